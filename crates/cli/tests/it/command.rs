//! Runs the binary and makes what it prints comparable: places, dates and ids become words.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// What a command did.
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl fmt::Display for Ran {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ran { code, stdout, stderr } = self;
        write!(f, "exit code: {code}\n----- stdout\n{stdout}----- stderr\n{stderr}")
    }
}

/// The corpus of checkpoints that PyTorch wrote.
pub(crate) fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../formats/tests/corpus").canonicalize().unwrap()
}

/// One of its checkpoints.
pub(crate) fn case(name: &str) -> String {
    corpus().join(name).join("checkpoint").to_str().unwrap().to_owned()
}

/// A command on a clean slate: no colors, no width, no cloud.
pub(crate) fn reshard(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_reshard"));
    command.args(args).stdin(Stdio::null());
    for (name, _) in std::env::vars() {
        if ["AWS_", "GOOGLE_", "AZURE_", "AZURITE_", "CLICOLOR"].iter().any(|prefix| name.starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    command.env_remove("NO_COLOR").env_remove("COLUMNS").env("TERM", "xterm");
    command
}

pub(crate) fn ran(output: &Output) -> Ran {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    Ran { code: output.status.code().unwrap_or(-1), stdout: text(&output.stdout), stderr: text(&output.stderr) }
}

pub(crate) fn run(args: &[&str]) -> Ran {
    let ran = ran(&reshard(args).output().unwrap());
    assert!(!ran.stderr.contains("panicked"), "{args:?}\n{ran}");
    assert!([0, 1, 2].contains(&ran.code), "{args:?}\n{ran}");
    ran
}

/// Runs what must be fine.
pub(crate) fn fine(args: &[&str]) -> String {
    let ran = run(args);
    assert_eq!(ran.code, 0, "{args:?}\n{ran}");
    ran.stdout
}

/// Runs what must be fine, as JSON.
pub(crate) fn json(args: &[&str]) -> serde_json::Value {
    serde_json::from_str(&fine(args)).unwrap()
}

/// Compares with the stored snapshot, everything that changes from run to run replaced.
pub(crate) fn snapshot(name: &str, folder: Option<&Path>, ran: &Ran) {
    let mut settings = insta::Settings::clone_current();
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    if let Some(folder) = folder {
        settings.add_filter(&regex::escape(folder.to_str().unwrap()), "[FOLDER]");
    }
    settings.add_filter(&regex::escape(corpus().to_str().unwrap()), "[CORPUS]");
    settings.add_filter(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "[DATE]");
    settings.add_filter(r#""(modified|seconds)": [0-9.e-]+"#, r#""$1": [NUMBER]"#);
    settings.add_filter(r"\b[0-9a-f]{24}\b", "[SAVE]");
    settings.add_filter(r"http://127\.0\.0\.1:\d+", "http://127.0.0.1:[PORT]");
    settings.bind(|| insta::assert_snapshot!(name, ran.to_string()));
}

/// Runs and compares.
pub(crate) fn check(name: &str, folder: Option<&Path>, args: &[&str]) {
    snapshot(name, folder, &run(args));
}

/// The entries of a digest, by key: their order is that of the file.
pub(crate) fn sorted_entries(digest: &str) -> Vec<(String, serde_json::Value)> {
    let digest: serde_json::Value = serde_json::from_str(digest).unwrap();
    let mut entries: Vec<_> = digest["entries"].as_object().unwrap().clone().into_iter().collect();
    entries.sort_by(|a, b| a.0.cmp(&b.0));
    entries
}

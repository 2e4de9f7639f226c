//! Facts about the build, for `reshard --version`.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=RESHARD_COMMIT");
    let commit =
        std::env::var("RESHARD_COMMIT").ok().or_else(|| said(Command::new("git").args(["rev-parse", "--short=10", "HEAD"])));
    // A commit changes the log of HEAD; without this the version would be that of the first build.
    if let Some(log) = said(Command::new("git").args(["rev-parse", "--git-path", "logs/HEAD"])) {
        println!("cargo:rerun-if-changed={log}");
    }
    let rustc = std::env::var("RUSTC").ok().and_then(|rustc| said(Command::new(rustc).arg("--version")));
    for (name, value) in [
        ("RESHARD_BUILD_COMMIT", commit),
        ("RESHARD_BUILD_RUSTC", rustc),
        ("RESHARD_BUILD_TARGET", std::env::var("TARGET").ok()),
        ("RESHARD_BUILD_PROFILE", std::env::var("PROFILE").ok()),
    ] {
        println!("cargo:rustc-env={name}={}", value.as_deref().unwrap_or("unknown"));
    }
}

fn said(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty() && !text.contains('\n'))
}

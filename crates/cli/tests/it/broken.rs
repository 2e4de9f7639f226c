//! Whatever is wrong, the command says what and why, and never panics.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::command::{case, check, ran, reshard, run, snapshot};
use crate::conversions::copy;

fn damaged(change: impl FnOnce(&Path)) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("checkpoint");
    copy(&case("torch-2.13/fsdp2_w3"), at.to_str().unwrap());
    change(&at);
    let at = at.to_str().unwrap().to_owned();
    (folder, at)
}

#[test]
fn a_place_without_a_checkpoint_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    check("broken_nowhere", Some(folder.path()), &["inspect", &at("nowhere")]);
    check("broken_empty_folder", Some(folder.path()), &["inspect", folder.path().to_str().unwrap()]);
    std::fs::write(folder.path().join("notes.txt"), "hello").unwrap();
    check("broken_not_a_checkpoint", Some(folder.path()), &["ls", folder.path().to_str().unwrap()]);
    check("broken_text_file", Some(folder.path()), &["inspect", &at("notes.txt")]);
    std::fs::write(folder.path().join("text.pt"), "hello").unwrap();
    check("broken_text_as_pt", Some(folder.path()), &["inspect", &at("text.pt")]);
    std::fs::write(folder.path().join("text.safetensors"), "hello, this is no safetensors file").unwrap();
    check("broken_text_as_safetensors", Some(folder.path()), &["digest", &at("text.safetensors")]);
    check("broken_address", None, &["inspect", "ftp://host/x"]);
    let (folder, at) = damaged(|_| {});
    check("broken_metadata_given", Some(folder.path()), &["inspect", &format!("{at}/.metadata")]);
    for verb in ["inspect", "ls", "stats", "verify", "digest"] {
        for file in [".metadata", "__1_0.distcp"] {
            let tried = run(&[verb, &format!("{at}/{file}")]);
            assert!(tried.code == 2 && tried.stderr.contains(&format!("give its folder: {at}")), "{verb}\n{tried}");
        }
    }
}

#[test]
fn damage_is_found_and_named() {
    let shown = crate::command::json(&["show", &case("torch-2.13/fsdp2_w3"), "model.head.weight", "--json", "--slice", "4:5"]);
    let row: Vec<u8> =
        shown["values"][0].as_array().unwrap().iter().flat_map(|v| (v.as_f64().unwrap() as f32).to_le_bytes()).collect();
    let (folder, at) = damaged(|at| {
        let file = at.join("__1_0.distcp");
        let mut bytes = std::fs::read(&file).unwrap();
        let path = bytes.windows(row.len()).position(|window| window == row).unwrap();
        bytes[path + 5] ^= 0x10;
        std::fs::write(&file, bytes).unwrap();
    });
    check("broken_bit_verify", Some(folder.path()), &["verify", &at]);
    let digest = run(&["digest", &at]);
    assert!(
        digest.code == 2 && digest.stderr.contains("__1_0.distcp") && digest.stderr.contains("model.head.weight"),
        "{digest}"
    );
}

#[test]
fn missing_and_cut_files_are_found() {
    let (folder, at) = damaged(|at| {
        std::fs::remove_file(at.join("__0_0.distcp")).unwrap();
        let file = at.join("__2_0.distcp");
        let bytes = std::fs::read(&file).unwrap();
        std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    });
    check("broken_files_inspect", Some(folder.path()), &["inspect", &at]);
    let verified = run(&["verify", &at]);
    assert!(
        verified.code == 1 && verified.stdout.contains("__0_0.distcp") && verified.stdout.contains("__2_0.distcp"),
        "{verified}"
    );
    check(
        "broken_files_convert",
        Some(folder.path()),
        &["convert", &at, folder.path().join("x.pt").to_str().unwrap(), "--include", "model.*"],
    );
    assert!(!folder.path().join("x.pt").exists());
    check("broken_files_show", Some(folder.path()), &["show", &at, "step"]);
}

#[test]
fn truncated_metadata_of_every_length_is_an_error() {
    let whole = std::fs::read(Path::new(&case("torch-2.13/fsdp2_w3")).join(".metadata")).unwrap();
    for share in [0, 1, 2, 10, 50, 90, 99] {
        let (_folder, at) = damaged(|at| std::fs::write(at.join(".metadata"), &whole[..whole.len() * share / 100]).unwrap());
        let inspected = run(&["inspect", &at]);
        assert_eq!(inspected.code, 2, "{share} %: {inspected}");
        assert!(inspected.stderr.starts_with("error: .metadata in ") && inspected.stderr.contains("hint: "), "{inspected}");
        assert_ne!(run(&["verify", &at]).code, 0);
    }
}

#[test]
fn hostile_metadata_runs_nothing() {
    let (folder, at) = damaged(|at| {
        let file = at.join("owned");
        // What `pickle.loads` would run: os.system("touch …").
        let pickle = format!("cos\nsystem\n(S'touch {}'\ntR.", file.display());
        std::fs::write(at.join(".metadata"), pickle).unwrap();
    });
    check("broken_hostile", Some(folder.path()), &["inspect", &at]);
    assert!(!Path::new(&at).join("owned").exists());
}

/// The files of a folder of fixtures, by name.
fn fixtures(folder: &str) -> Vec<std::path::PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../formats/tests").join(folder);
    let mut found: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.retain(|path| !path.extension().is_some_and(|end| end == "json" || end == "runs"));
    found.sort();
    assert!(!found.is_empty());
    found
}

/// A checkpoint with this file as its metadata.
fn with_metadata(path: &Path) -> (tempfile::TempDir, String) {
    damaged(|at| {
        std::fs::copy(path, at.join(".metadata")).unwrap();
    })
}

#[test]
fn every_hostile_file_is_an_error_that_says_why() {
    for path in fixtures("pickles/hostile/metadata") {
        let (_folder, at) = with_metadata(&path);
        for verb in ["inspect", "digest"] {
            let ran = run(&[verb, &at]);
            let told = ran.stderr.starts_with("error: .metadata in ") && ran.stderr.contains("caused by: ");
            assert!(ran.code == 2 && told, "{}: {ran}", path.display());
        }
        let verified = run(&["verify", &at]);
        assert!(verified.code == 1 && verified.stdout.starts_with("error: .metadata: "), "{}: {verified}", path.display());
    }
    for path in fixtures("pickles/hostile/coverage") {
        let (_folder, at) = with_metadata(&path);
        let ran = run(&["verify", "--quick", &at]);
        assert!(ran.code == 1 && ran.stdout.starts_with("error: "), "{}: {ran}", path.display());
    }
    for path in fixtures("records/hostile") {
        for verb in ["verify", "digest"] {
            let ran = run(&[verb, path.to_str().unwrap()]);
            // Objects that only unpickling could bring back may lie beside tensors that are fine: their class is named.
            let named = ran.code == 0 && (verb == "verify" || ran.stdout.contains("class"));
            assert!(ran.code != 0 || named, "{verb} {}: {ran}", path.display());
        }
    }
}

#[test]
fn keys_cannot_write_to_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let header = r#"{"a\u001b[31mb\u0007":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(&[0; 4]);
    let at = folder.path().join("evil.safetensors");
    std::fs::write(&at, bytes).unwrap();
    for verb in [&["ls"][..], &["inspect"], &["ls", "--tree"]] {
        let shown = run(&[verb, &[at.to_str().unwrap()]].concat());
        assert!(shown.code == 0 && !shown.stdout.contains('\u{1b}') && shown.stdout.contains("u{1b}"), "{shown}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_file_that_may_not_be_read_is_told() {
    use std::os::unix::fs::PermissionsExt;
    let (folder, at) = damaged(|at| {
        std::fs::set_permissions(at.join(".metadata"), std::fs::Permissions::from_mode(0o0)).unwrap();
    });
    let inspected = ran(&without_privileges(reshard(&["inspect", &at])).output().unwrap());
    snapshot("broken_permission", Some(folder.path()), &inspected);
    let verified = ran(&without_privileges(reshard(&["verify", &at])).output().unwrap());
    assert!(verified.code == 2 && verified.stderr.contains("permission denied"), "{verified}");
    let (_folder, at) = damaged(|at| {
        std::fs::set_permissions(at.join("__1_0.distcp"), std::fs::Permissions::from_mode(0o0)).unwrap();
    });
    let digest = ran(&without_privileges(reshard(&["digest", &at])).output().unwrap());
    assert!(digest.code == 2 && digest.stderr.contains("__1_0.distcp") && digest.stderr.contains("permission"), "{digest}");
}

/// Takes from root what lets it read everything; others have it not.
#[cfg(target_os = "linux")]
fn without_privileges(mut command: Command) -> Command {
    use std::os::unix::process::CommandExt;
    const CAP_DAC_OVERRIDE: libc::c_ulong = 1;
    const CAP_DAC_READ_SEARCH: libc::c_ulong = 2;
    // SAFETY: prctl is safe to call between fork and exec, and these change nothing but what the child may do.
    unsafe {
        command.pre_exec(|| {
            for capability in [CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH] {
                libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
            }
            Ok(())
        });
    }
    command
}

#[test]
fn a_folder_in_place_of_a_file_is_told() {
    let (folder, at) = damaged(|at| {
        std::fs::remove_file(at.join("__0_0.distcp")).unwrap();
        std::fs::create_dir(at.join("__0_0.distcp")).unwrap();
    });
    let digest = run(&["digest", &at]);
    assert!(digest.code == 2 && digest.stderr.starts_with("error: "), "{digest}");
    drop(folder);
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    for args in [&["ls", "--json"][..], &["digest"], &["ls", "--tree"], &["completions", "bash"]] {
        let path = case("torch-2.13/tp_fsdp2_w4");
        let args: Vec<&str> = if args[0] == "completions" { args.to_vec() } else { [args, &[path.as_str()]].concat() };
        let mut child = reshard(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        let code = child.wait().unwrap().code();
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn a_full_disk_is_an_error() {
    let Ok(full) = std::fs::OpenOptions::new().write(true).open("/dev/full") else {
        println!("skipped: there is no /dev/full");
        return;
    };
    let output = reshard(&["ls", &case("torch-2.13/zoo")]).stdout(full).stderr(Stdio::piped()).output().unwrap();
    let ran = ran(&output);
    assert!(ran.code == 2 && ran.stderr.contains("error: cannot write the output"), "{ran}");
}

#[test]
fn destinations_that_cannot_be_written_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "in the way").unwrap();
    let below = file.join("dcp").to_str().unwrap().to_owned();
    let converted = run(&["convert", &case("torch-2.13/zoo"), &below, "--to", "dcp"]);
    assert!(converted.code == 2 && converted.stderr.starts_with("error: "), "{converted}");
    let reported = run(&["report", &case("torch-2.13/zoo"), "-o", file.join("x.html").to_str().unwrap()]);
    assert!(reported.code == 2 && reported.stderr.contains("caused by: "), "{reported}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "in the way");
}

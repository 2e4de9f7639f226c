//! The demo, and the commands that it ends with.

use std::process::Command;

use crate::command::reshard;

#[test]
fn the_demo_ends_with_commands_that_can_be_pasted() {
    let folder = tempfile::tempdir().unwrap();
    let ran = reshard(&["demo", "-o", "a demo's folder"]).current_dir(folder.path()).output().unwrap();
    let said = String::from_utf8(ran.stdout).unwrap();
    assert!(ran.status.success(), "{said}{}", String::from_utf8_lossy(&ran.stderr));
    let commands: Vec<&str> = said.rsplit("Try on it:\n").next().unwrap().lines().collect();
    assert_eq!(commands.len(), 7, "{said}");
    for command in commands {
        let pasted = Command::new("sh").args(["-c", command]).current_dir(folder.path()).output().unwrap();
        assert!(pasted.status.success(), "{command}: {}", String::from_utf8_lossy(&pasted.stderr));
    }
}

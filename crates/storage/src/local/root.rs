//! The root folder, and how paths below it are opened so that they stay below it: `openat2` with `RESOLVE_BENEATH`,
//! or, where the kernel has none, a walk that follows no symbolic link at all.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::system;
use super::transfer::retry;
use crate::path::split;
use crate::{Operation, Result, StorageError, check_relative};

const FOLDER: OFlags = system::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

#[derive(Clone, Debug)]
pub(super) struct Root {
    path: PathBuf,
    follow_symlinks: bool,
}

impl Root {
    pub(super) fn new(path: PathBuf, follow_symlinks: bool) -> Root {
        Root { path, follow_symlinks }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The full path, for messages and for the few calls that have no `…at` form.
    pub(super) fn full(&self, relative: &str) -> PathBuf {
        if relative.is_empty() { self.path.clone() } else { self.path.join(relative) }
    }

    pub(super) fn shown(&self, relative: &str) -> String {
        self.full(relative).display().to_string()
    }

    pub(super) fn error(&self, operation: Operation, relative: &str, error: Errno) -> StorageError {
        StorageError::from_io(operation, self.shown(relative), io::Error::from(error))
    }

    /// Opens a file below the root.
    pub(super) fn open(&self, operation: Operation, relative: &str, flags: OFlags, mode: Mode) -> Result<OwnedFd> {
        check_relative(relative)?;
        let root = self.open_root(operation)?;
        self.open_below(&root, operation, relative, flags | OFlags::CLOEXEC, mode)
    }

    /// Creates a file that must not exist, and the folders above it.
    pub(super) fn create(&self, operation: Operation, relative: &str) -> Result<File> {
        check_relative(relative)?;
        let (folder, name) = split(relative);
        let folder = self.folder(operation, folder, true)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        // O_EXCL never follows a symbolic link in the last part.
        let mode = Mode::from_raw_mode(0o666);
        retry(|| rustix::fs::openat(&folder, name, flags, mode))
            .map(File::from)
            .map_err(|error| self.error(operation, relative, error))
    }

    /// Removes a file's name.
    pub(super) fn unlink(&self, operation: Operation, relative: &str) -> Result<()> {
        check_relative(relative)?;
        let (folder, name) = split(relative);
        let folder = self.folder(operation, folder, false)?;
        super::unlink_at(&folder, name).map_err(|error| self.error(operation, relative, error))
    }

    /// Opens a folder below the root (`""` is the root itself), after making it if told to.
    pub(super) fn folder(&self, operation: Operation, relative: &str, make: bool) -> Result<OwnedFd> {
        let root = self.open_root(operation)?;
        if relative.is_empty() {
            return Ok(root);
        }
        check_relative(relative)?;
        match self.open_below(&root, operation, relative, FOLDER, Mode::empty()) {
            Err(StorageError::NotFound { .. }) if make => {}
            done => return done,
        }
        // Part by part, each below the root by the kernel's word.
        let (above, name) = split(relative);
        let above_fd = self.folder(operation, above, true)?;
        match rustix::fs::mkdirat(&above_fd, name, Mode::from_raw_mode(0o777)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(self.error(operation, relative, error)),
        }
        self.open_below(&root, operation, relative, FOLDER, Mode::empty())
    }

    fn open_root(&self, operation: Operation) -> Result<OwnedFd> {
        retry(|| rustix::fs::open(&self.path, FOLDER, Mode::empty())).map_err(|error| self.error(operation, "", error))
    }

    fn open_below(&self, root: &OwnedFd, operation: Operation, relative: &str, flags: OFlags, mode: Mode) -> Result<OwnedFd> {
        let opened = if self.follow_symlinks {
            retry(|| rustix::fs::openat(root, relative, flags, mode))
        } else if let Some(opened) = system::open_beneath(root, relative, flags, mode) {
            opened
        } else {
            open_without_links(root, relative, flags, mode)
        };
        opened.map_err(|error| match error {
            Errno::XDEV | Errno::LOOP => {
                StorageError::BadPath { path: self.shown(relative), reason: "a symbolic link leads outside of the root" }
            }
            error => self.error(operation, relative, error),
        })
    }
}

/// Opens part by part and refuses every symbolic link.
fn open_without_links(root: &OwnedFd, relative: &str, flags: OFlags, mode: Mode) -> rustix::io::Result<OwnedFd> {
    let mut at: Option<OwnedFd> = None;
    let (folder, name) = split(relative);
    for part in folder.split('/').filter(|part| !part.is_empty()) {
        let from = at.as_ref().unwrap_or(root).as_fd();
        let next = retry(|| rustix::fs::openat(from, part, FOLDER | OFlags::NOFOLLOW, Mode::empty()));
        at = Some(next.map_err(|error| link_or(error, from, part))?);
    }
    let from = at.as_ref().unwrap_or(root).as_fd();
    let fd =
        retry(|| rustix::fs::openat(from, name, flags | OFlags::NOFOLLOW, mode)).map_err(|error| link_or(error, from, name))?;
    // With O_PATH, O_NOFOLLOW opens the link itself.
    let kind = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode);
    if kind == rustix::fs::FileType::Symlink { Err(Errno::LOOP) } else { Ok(fd) }
}

/// The kernel says "not a folder" of a link that it was told not to follow; say what it is.
fn link_or(error: Errno, folder: impl AsFd, name: &str) -> Errno {
    if error != Errno::NOTDIR {
        return error;
    }
    match rustix::fs::statat(folder, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) if rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::Symlink => Errno::LOOP,
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn linked_root() -> (tempfile::TempDir, Root) {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        std::fs::create_dir_all(root.join("sub")).unwrap();
        std::fs::write(folder.path().join("secret"), b"x").unwrap();
        std::fs::write(root.join("sub/inside"), b"x").unwrap();
        std::os::unix::fs::symlink(folder.path(), root.join("out")).unwrap();
        std::os::unix::fs::symlink("../secret", root.join("leak")).unwrap();
        std::os::unix::fs::symlink("sub/inside", root.join("within")).unwrap();
        (folder, Root::new(root, false))
    }

    #[test]
    fn links_out_of_the_root_are_refused_and_links_within_are_followed() {
        let (_folder, root) = linked_root();
        let open = |path| root.open(Operation::Read, path, OFlags::RDONLY, Mode::empty());
        for path in ["out/secret", "leak"] {
            assert!(matches!(open(path), Err(StorageError::BadPath { .. })), "{path}: {:?}", open(path));
        }
        let folder = root.open_root(Operation::Read).unwrap();
        let known = system::open_beneath(&folder, ".", FOLDER, Mode::empty()).is_some();
        assert!(open("within").is_ok() || !known);
        assert!(matches!(root.create(Operation::Create, "out/new"), Err(StorageError::BadPath { .. })));
        assert!(matches!(root.create(Operation::Create, "out/deep/new"), Err(StorageError::BadPath { .. })));
        assert!(matches!(root.unlink(Operation::Delete, "out/secret"), Err(StorageError::BadPath { .. })));
    }

    #[test]
    fn the_walk_without_openat2_refuses_the_same() {
        let (_folder, root) = linked_root();
        let fd = root.open_root(Operation::Read).unwrap();
        let open = |path| open_without_links(&fd, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        for path in ["out/secret", "leak", "within"] {
            assert_eq!(open(path).unwrap_err(), Errno::LOOP, "{path}");
        }
        assert!(open("sub/inside").is_ok());
        assert_eq!(open("sub/missing").unwrap_err(), Errno::NOENT);
        let path_only = open_without_links(&fd, "leak", system::PATH | OFlags::CLOEXEC, Mode::empty());
        assert_eq!(path_only.unwrap_err(), Errno::LOOP);
    }

    #[test]
    fn following_links_is_a_choice() {
        let (_folder, root) = linked_root();
        let root = Root::new(root.path().to_owned(), true);
        assert!(root.open(Operation::Read, "leak", OFlags::RDONLY, Mode::empty()).is_ok());
        assert!(root.open(Operation::Read, "../secret", OFlags::RDONLY, Mode::empty()).is_err());
    }
}

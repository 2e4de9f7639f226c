//! Addresses: what a user types to say where a checkpoint is. A path, or a URL of a known scheme.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::{Result, StorageError};

/// The kind of place that an address names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Scheme {
    /// The local file system: a plain path, or `file://`.
    File,
    /// Memory of this process, shared by name: `memory://NAME`.
    Memory,
    /// Amazon S3 and what speaks its protocol: `s3://BUCKET/KEY`.
    S3,
    /// Google Cloud Storage: `gs://BUCKET/KEY`.
    Gcs,
    /// Azure Blob Storage: `az://CONTAINER/KEY`.
    Azure,
    /// A web server: `http://` or `https://`.
    Http,
}

/// Where a checkpoint, or a folder of them, is.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address(Inner);

#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Inner {
    Local(PathBuf),
    Remote {
        scheme: Scheme,
        /// As written: `s3`, `https`, …
        prefix: &'static str,
        /// Bucket, container, host (with port), or name of the memory.
        authority: String,
        /// Below it, `/` between the parts, none at either end.
        path: String,
    },
}

const REMOTE: &[(&str, &str, Scheme)] = &[
    ("memory", "memory", Scheme::Memory),
    ("s3", "s3", Scheme::S3),
    ("s3a", "s3", Scheme::S3),
    ("gs", "gs", Scheme::Gcs),
    ("gcs", "gs", Scheme::Gcs),
    ("az", "az", Scheme::Azure),
    ("azure", "az", Scheme::Azure),
    ("http", "http", Scheme::Http),
    ("https", "https", Scheme::Http),
];

impl Address {
    /// Understands a path, `file://`, `memory://`, `s3://`, `gs://`, `az://`, `http://` or `https://`.
    pub fn parse(text: &str) -> Result<Address> {
        let bad = |reason: &str| StorageError::BadAddress { address: crate::redacted(text), reason: reason.to_owned() };
        if text.is_empty() {
            return Err(bad("it is empty"));
        }
        if text.contains('\0') {
            return Err(bad("it contains a NUL byte"));
        }
        let Some((scheme, rest)) = split_scheme(text) else {
            return Ok(Address(Inner::Local(PathBuf::from(text))));
        };
        let scheme = scheme.to_ascii_lowercase();
        if scheme == "file" {
            let path = rest.strip_prefix("localhost").unwrap_or(rest);
            if !path.starts_with('/') {
                return Err(bad("a file:// address needs an absolute path, as in file:///data/run"));
            }
            let path = percent_decode(path).ok_or_else(|| bad("its percent-encoding is broken"))?;
            if path.contains('\0') {
                return Err(bad("it contains a NUL byte"));
            }
            return Ok(Address(Inner::Local(PathBuf::from(path))));
        }
        let Some(&(_, prefix, kind)) = REMOTE.iter().find(|(name, ..)| *name == scheme) else {
            return Err(bad("its scheme is none of file, s3, gs, az, http, https, memory"));
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        if authority.is_empty() {
            return Err(bad("it names no bucket, container, host or memory"));
        }
        let port = authority.split_once(':').is_some_and(|(_, port)| !port.bytes().all(|b| b.is_ascii_digit()));
        if authority.contains('@') || (port && kind != Scheme::Memory) {
            return Err(bad("credentials do not belong in an address"));
        }
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        if parts.iter().any(|part| matches!(*part, "." | "..")) {
            return Err(bad("it contains `.` or `..`"));
        }
        if kind == Scheme::Http && path.contains(['?', '#']) {
            return Err(bad("a query or fragment cannot be joined with file names"));
        }
        let query = path.split_once('?').map(|(_, query)| query.to_ascii_lowercase());
        if query.is_some_and(|query| ["sig=", "signature=", "token=", "secret="].iter().any(|word| query.contains(word))) {
            return Err(bad("signatures do not belong in an address; give them as settings of the store"));
        }
        Ok(Address(Inner::Remote { scheme: kind, prefix, authority: authority.to_owned(), path: parts.join("/") }))
    }

    /// A place on the local file system.
    pub fn local(path: impl Into<PathBuf>) -> Address {
        Address(Inner::Local(path.into()))
    }

    /// The kind of place.
    pub fn scheme(&self) -> Scheme {
        match &self.0 {
            Inner::Local(_) => Scheme::File,
            Inner::Remote { scheme, .. } => *scheme,
        }
    }

    /// The path on the local file system, if it is there.
    pub fn local_path(&self) -> Option<&Path> {
        match &self.0 {
            Inner::Local(path) => Some(path),
            Inner::Remote { .. } => None,
        }
    }

    /// The bucket, container, host or memory; empty on the local file system.
    pub fn authority(&self) -> &str {
        match &self.0 {
            Inner::Local(_) => "",
            Inner::Remote { authority, .. } => authority,
        }
    }

    /// The path below the authority; empty on the local file system.
    pub fn key(&self) -> &str {
        match &self.0 {
            Inner::Local(_) => "",
            Inner::Remote { path, .. } => path,
        }
    }

    /// The address of something below this one. `relative` must pass [`crate::check_relative`].
    pub fn join(&self, relative: &str) -> Result<Address> {
        crate::check_relative(relative)?;
        Ok(Address(match &self.0 {
            Inner::Local(path) => Inner::Local(path.join(relative)),
            Inner::Remote { scheme, prefix, authority, path } => {
                Inner::Remote { scheme: *scheme, prefix, authority: authority.clone(), path: crate::path::join(path, relative) }
            }
        }))
    }

    /// The address of the folder that holds this one; `None` at the top.
    pub fn parent(&self) -> Option<Address> {
        match &self.0 {
            Inner::Local(path) => {
                let parent = path.parent()?;
                let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
                Some(Address::local(parent))
            }
            Inner::Remote { path, .. } if path.is_empty() => None,
            Inner::Remote { scheme, prefix, authority, path } => Some(Address(Inner::Remote {
                scheme: *scheme,
                prefix,
                authority: authority.clone(),
                path: crate::path::split(path).0.to_owned(),
            })),
        }
    }

    /// The last part of the path.
    pub fn file_name(&self) -> Option<String> {
        match &self.0 {
            Inner::Local(path) => Some(path.file_name()?.to_string_lossy().into_owned()),
            Inner::Remote { path, .. } if path.is_empty() => None,
            Inner::Remote { path, .. } => Some(crate::path::split(path).1.to_owned()),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Inner::Local(path) => write!(f, "{}", path.display()),
            Inner::Remote { prefix, authority, path, .. } if path.is_empty() => write!(f, "{prefix}://{authority}"),
            Inner::Remote { prefix, authority, path, .. } => write!(f, "{prefix}://{authority}/{path}"),
        }
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Address({self})")
    }
}

impl FromStr for Address {
    type Err = StorageError;

    fn from_str(text: &str) -> Result<Address> {
        Address::parse(text)
    }
}

/// `scheme` and what follows `://`, if that is how the text starts. A path such as `a/b://c` has none.
fn split_scheme(text: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = text.split_once("://")?;
    let mut letters = scheme.chars();
    let starts_well = letters.next().is_some_and(|first| first.is_ascii_alphabetic());
    let goes_on_well = letters.all(|letter| letter.is_ascii_alphanumeric() || "+-.".contains(letter));
    (starts_well && goes_on_well).then_some((scheme, rest))
}

fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let high = char::from(rest.next()?).to_digit(16)?;
            let low = char::from(rest.next()?).to_digit(16)?;
            bytes.push((high * 16 + low) as u8);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scheme_is_understood_and_written_back() {
        for (text, scheme, shown) in [
            ("/data/run", Scheme::File, "/data/run"),
            ("run/step_1", Scheme::File, "run/step_1"),
            ("file:///data/a%20b", Scheme::File, "/data/a b"),
            ("memory://name", Scheme::Memory, "memory://name"),
            ("s3://bucket/a//b/", Scheme::S3, "s3://bucket/a/b"),
            ("S3://bucket", Scheme::S3, "s3://bucket"),
            ("gs://bucket/a", Scheme::Gcs, "gs://bucket/a"),
            ("az://container/a", Scheme::Azure, "az://container/a"),
            ("https://host:81/a", Scheme::Http, "https://host:81/a"),
            ("a/b://c", Scheme::File, "a/b://c"),
        ] {
            let address = Address::parse(text).unwrap();
            assert_eq!(address.scheme(), scheme, "{text}");
            assert_eq!(address.to_string(), shown);
            assert_eq!(Address::parse(shown).unwrap(), address);
        }
    }

    #[test]
    fn addresses_that_make_no_sense_are_refused() {
        for text in ["", "ftp://x/y", "s3://", "s3:///key", "file://relative", "file:///%zz", "s3://b/../c", "s3://u:p@b/c"] {
            assert!(matches!(Address::parse(text), Err(StorageError::BadAddress { .. })), "{text:?}");
        }
        for text in
            ["s3://u:hush@b/c", "s3://u:hu/sh@b", "s3://u:hush", "az://c/k?sv=1&sig=hush", "https://h/x?X-Amz-Signature=hush"]
        {
            let error = Address::parse(text).unwrap_err().to_string();
            assert!(!error.contains("hu"), "{error}");
        }
    }

    #[test]
    fn join_parent_and_file_name_agree() {
        for text in ["/data", "s3://bucket/runs", "s3://bucket"] {
            let root = Address::parse(text).unwrap();
            let step = root.join("step_1").unwrap();
            assert_eq!(step.parent().unwrap(), root);
            assert_eq!(step.file_name().unwrap(), "step_1");
            assert!(root.join("../x").is_err());
        }
        assert_eq!(Address::parse("s3://bucket").unwrap().parent(), None);
        assert_eq!(Address::parse("x").unwrap().parent().unwrap().to_string(), ".");
    }
}

//! Records behind a stream transform: what PyTorch's `ZStandard` extension makes of them.
//!
//! A record that was compressed is read as if it were a file of its own, so that nothing above knows about it: the catalog names
//! the stretch of the data file, [`read`] gives it as a reader of the bytes that were compressed, in bounded memory. [`write`]
//! makes such records. One frame holds one record; values of ours are never compressed.

pub(crate) mod read;
pub(crate) mod write;

use serde::{Deserialize, Serialize};

/// How records of tensors are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Compression {
    /// Zstandard, as PyTorch's `ZStandard` extension writes it: PyTorch reads it back where the `zstandard` or the `pyzstd` package
    /// is installed.
    Zstd,
}

impl Compression {
    /// As in `--compress`.
    pub fn name(self) -> &'static str {
        match self {
            Compression::Zstd => "zstd",
        }
    }

    /// The compression of a name.
    pub fn parse(name: &str) -> Option<Compression> {
        (name == Compression::Zstd.name()).then_some(Compression::Zstd)
    }

    /// What `.metadata` says of a record that was compressed: the extension's name and version.
    pub(crate) fn descriptor(self) -> &'static str {
        match self {
            Compression::Zstd => "stream.zstd/1",
        }
    }

    /// What was done to a record, by the descriptors of its transforms; `None` where that cannot be undone here.
    pub(crate) fn of(descriptors: &str) -> Option<Compression> {
        let version = descriptors.strip_prefix("stream.zstd/")?;
        (version.split('.').next() == Some("1") && !version.contains(',')).then_some(Compression::Zstd)
    }

    /// The compression whose descriptor this is, but for a letter or two: what damage makes of it, and nobody calls a transform of
    /// their own.
    pub(crate) fn garbled(descriptors: &str) -> Option<Compression> {
        let known = Compression::Zstd.descriptor();
        let differing = known.bytes().zip(descriptors.bytes()).filter(|(a, b)| a != b).count();
        (known.len() == descriptors.len() && (1..=2).contains(&differing)).then_some(Compression::Zstd)
    }
}

#[cfg(test)]
mod tests {
    use super::Compression;

    #[test]
    fn a_name_that_damage_made_is_told_from_one_of_somebody_else() {
        for garbled in ["stream.zstd/2", "streal.zstd/1", "stream.zstd,1"] {
            assert_eq!(Compression::garbled(garbled), Some(Compression::Zstd), "{garbled}");
        }
        for other in ["stream.zstd/1", "stream.turned/3", "stream.lzma/1", "stream.zlib/1", ""] {
            assert_eq!(Compression::garbled(other), None, "{other}");
        }
    }

    #[test]
    fn only_what_is_known_is_undone() {
        for known in ["stream.zstd/1", "stream.zstd/1.2"] {
            assert_eq!(Compression::of(known), Some(Compression::Zstd), "{known}");
        }
        for unknown in ["stream.zstd", "stream.zstd/2", "stream.zstd/10", "stream.zstd/1, stream.zstd/1", "x.aes/1"] {
            assert_eq!(Compression::of(unknown), None, "{unknown}");
        }
    }
}

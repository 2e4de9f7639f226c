//! Whether a checkpoint looks whole: what can be told from its metadata and a listing, in no time.

use reshard::Checkpoint;

use super::cut::Cut;
use super::files::{FileShare, Listing};
use crate::human;

/// No screen shows more.
const MOST: usize = 1000;

/// One thing that does not look right.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Trouble {
    /// Whether something is missing or damaged, or merely to know.
    pub(crate) bad: bool,
    /// In one sentence.
    pub(crate) text: String,
    /// The key it concerns.
    pub(crate) key: Option<String>,
    /// The file it concerns.
    pub(crate) file: Option<String>,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Health {
    /// At most a thousand, bad ones first.
    pub(crate) troubles: Vec<Trouble>,
    /// Bad ones in all.
    pub(crate) bad: u64,
    /// What could be looked at, in words.
    pub(crate) checked: String,
    /// Whether the store did not say of every file whether it is there.
    pub(crate) unseen: bool,
}

impl Health {
    fn add(&mut self, bad: bool, text: String, key: Option<&str>, file: Option<&str>) {
        self.bad += u64::from(bad);
        if self.troubles.len() < MOST {
            self.troubles.push(Trouble { bad, text, key: key.map(str::to_owned), file: file.map(str::to_owned) });
        }
    }

    pub(super) fn tensor(&mut self, key: &str, cut: &Cut) {
        if let Cut::Broken(why) = cut {
            self.add(true, format!("{}: {why}", human::printable(key)), Some(key), None);
        }
    }

    pub(super) fn files(&mut self, checkpoint: &Checkpoint, listing: &Listing, files: &mut [FileShare]) {
        if let Some(why) = &listing.unlisted {
            self.add(false, format!("the folder could not be listed, its files were asked for one by one: {why}"), None, None);
        }
        if let Some(trouble) = &listing.trouble {
            self.add(false, format!("the files could not be looked for: {trouble}"), None, None);
            self.unseen = true;
        }
        let seen = if self.unseen { &[][..] } else { &*files };
        for file in seen {
            match file.size {
                None => self.add(true, format!("{} is missing", file.path), None, Some(&file.path)),
                Some(size) if size < file.used => {
                    let text = format!("{} is cut short: {} bytes, of which {} are needed", file.path, size, file.used);
                    self.add(true, text, None, Some(&file.path));
                }
                Some(_) => {}
            }
        }
        let unknown: Vec<_> = listing.unknown(checkpoint);
        if let [first, rest @ ..] = &unknown[..] {
            let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
            let bytes = human::bytes(unknown.iter().map(|file| file.size).sum());
            let text = format!("{}{more}: data files of another save ({bytes})", first.path);
            self.add(false, text, None, Some(&first.path));
        }
        self.troubles.sort_by_key(|trouble| !trouble.bad);
        self.checked = if self.unseen {
            "the metadata places every element exactly once; whether its files are there could not be seen".to_owned()
        } else {
            format!(
                "every element is stored exactly once, {} there and long enough",
                if files.len() == 1 { "the file is" } else { "all files are" }
            )
        };
    }
}

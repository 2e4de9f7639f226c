//! What can be wrong with a pickle, always with the byte position or the class that is to blame.

use thiserror::Error;

/// Why a pickle was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PickleError {
    /// The bytes end before the pickle does, or a length points past the end.
    #[error("pickle is cut short at byte {at}: {needed} more bytes were announced than there are")]
    Truncated {
        /// Position of the instruction that needed more.
        at: usize,
        /// How many bytes are missing.
        needed: u64,
    },
    /// A byte that is no instruction of any protocol up to 5.
    #[error("unknown pickle instruction 0x{opcode:02x} at byte {at}")]
    Opcode {
        /// The byte.
        opcode: u8,
        /// Its position.
        at: usize,
    },
    /// A protocol newer than 5.
    #[error("pickle protocol {version} is not known (at byte {at})")]
    Protocol {
        /// The announced protocol.
        version: u8,
        /// Its position.
        at: usize,
    },
    /// An instruction takes more values than there are.
    #[error("pickle instruction at byte {at} takes a value that is not there")]
    StackUnderflow {
        /// Position of the instruction.
        at: usize,
    },
    /// A memo slot is read that nothing was put in.
    #[error("pickle instruction at byte {at} reads memo slot {index}, which is empty")]
    Memo {
        /// The slot.
        index: u64,
        /// Position of the instruction.
        at: usize,
    },
    /// A string is not valid text.
    #[error("string at byte {at} is not valid Unicode")]
    Unicode {
        /// Position of the instruction.
        at: usize,
    },
    /// A number, length or escape written as text could not be read.
    #[error("malformed {what} at byte {at}")]
    Text {
        /// What was being read.
        what: &'static str,
        /// Position of the instruction.
        at: usize,
    },
    /// A class or function that is not on the list of what is known to be data.
    #[error("refused `{module}.{name}` at byte {at}: not a class that is known to be plain data")]
    Refused {
        /// The module, as the file spells it.
        module: String,
        /// The name inside the module.
        name: String,
        /// Position of the instruction.
        at: usize,
    },
    /// An instruction finds a value of the wrong type.
    #[error("pickle instruction at byte {at} expects {expected}")]
    Type {
        /// What should have been there.
        expected: &'static str,
        /// Position of the instruction.
        at: usize,
    },
    /// Something that two readers would understand differently, or that would be done without showing in the result.
    ///
    /// No pickler writes it for plain data; whoever wants a file to look harmless does.
    #[error("refused pickle instruction at byte {at}: it {what}")]
    Ambiguous {
        /// What it does.
        what: &'static str,
        /// Position of the instruction.
        at: usize,
    },
    /// A limit of the decoder or encoder is exceeded.
    #[error("pickle exceeds the limit of {limit} {what} (at byte {at})")]
    Limit {
        /// What is counted.
        what: &'static str,
        /// The limit.
        limit: u64,
        /// Position at which it was exceeded (0 where there is none).
        at: usize,
    },
    /// Something that is part of the pickle format but needs more than the file.
    #[error("pickle instruction at byte {at} needs {what}, which a file cannot carry")]
    Unsupported {
        /// What it needs.
        what: &'static str,
        /// Position of the instruction.
        at: usize,
    },
    /// The pickle is sound but holds something that is not a plain value.
    #[error("not a plain value: {what}{}", path_suffix(.path))]
    NotPlain {
        /// What was found.
        what: String,
        /// Where in the value, outermost first (`["a"][3]`); empty at the top.
        path: String,
    },
    /// A dictionary or set holds the same key twice.
    #[error("key {key} occurs twice in one dictionary or set{}", path_suffix(.path))]
    DuplicateKey {
        /// The key, as Python would print it.
        key: String,
        /// Where in the value; empty at the top.
        path: String,
    },
    /// A container contains itself.
    #[error("value contains itself{}", path_suffix(.path))]
    Cycle {
        /// Where in the value; empty at the top.
        path: String,
    },
    /// Encoding was asked for a protocol that is not written.
    #[error("pickle protocol {protocol} cannot be written (2 to 5 can)")]
    WriteProtocol {
        /// The requested protocol.
        protocol: u8,
    },
}

fn path_suffix(path: &str) -> String {
    if path.is_empty() { String::new() } else { format!(" at {path}") }
}

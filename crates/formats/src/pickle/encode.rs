//! The encoder: writes instructions, keeps the memo and frames.
//!
//! Repeated strings, classes and objects are written once and referred to afterwards, as CPython does. Unlike
//! CPython it gives memo slots only to what the caller may refer to again, so that slots stay few, references
//! short, and loading in Python does less.

use std::collections::HashMap;

use num_bigint::BigInt;

use super::error::PickleError;
use super::opcode as op;

/// CPython's aim for the size of a frame.
const FRAME_TARGET: usize = 64 * 1024;
const FRAME_HEADER: usize = 9;
/// Elements that one APPENDS or SETITEMS adds at most, as CPython does.
pub(crate) const BATCH: usize = 1000;
/// Longer strings are not looked up among those already written.
const INTERN_UP_TO: usize = 256;

/// A memo slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot(u32);

/// Writes one pickle of protocol 2 to 5, value by value.
#[derive(Debug)]
pub struct Encoder {
    out: Vec<u8>,
    protocol: u8,
    slots: u32,
    /// Where the open frame's header is.
    frame: Option<usize>,
    globals: HashMap<(String, String), Slot>,
    strings: HashMap<String, Slot>,
}

impl Encoder {
    /// An encoder for a protocol from 2 to 5.
    pub fn new(protocol: u8) -> Result<Encoder, PickleError> {
        Encoder::with_capacity(protocol, 256)
    }

    /// An encoder with room for `bytes` of output.
    pub fn with_capacity(protocol: u8, bytes: usize) -> Result<Encoder, PickleError> {
        if !(2..=5).contains(&protocol) {
            return Err(PickleError::WriteProtocol { protocol });
        }
        let mut out = Vec::with_capacity(bytes);
        out.extend_from_slice(&[op::PROTO, protocol]);
        let (globals, strings) = (HashMap::new(), HashMap::new());
        let mut encoder = Encoder { out, protocol, slots: 0, frame: None, globals, strings };
        encoder.open_frame();
        Ok(encoder)
    }

    /// The protocol being written.
    pub fn protocol(&self) -> u8 {
        self.protocol
    }

    /// Ends the pickle and gives its bytes.
    pub fn finish(mut self) -> Vec<u8> {
        self.out.push(op::STOP);
        self.close_frame();
        self.out
    }

    fn open_frame(&mut self) {
        if self.protocol >= 4 {
            self.frame = Some(self.out.len());
            self.out.extend_from_slice(&[op::FRAME, 0, 0, 0, 0, 0, 0, 0, 0]);
        }
    }

    fn close_frame(&mut self) {
        if let Some(start) = self.frame.take() {
            let len = (self.out.len() - start - FRAME_HEADER) as u64;
            self.out[start + 1..start + FRAME_HEADER].copy_from_slice(&len.to_le_bytes());
        }
    }

    /// Starts a new frame when the open one is full. To be called between instructions, now and then.
    #[inline]
    pub(crate) fn frame_break(&mut self) {
        if let Some(start) = self.frame
            && self.out.len() - start >= FRAME_TARGET
        {
            self.close_frame();
            self.open_frame();
        }
    }

    /// Instructions without operands, or with operands already in place.
    #[inline]
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    /// Keeps the value just written for later reference.
    #[inline]
    pub fn memoize(&mut self) -> Slot {
        let slot = Slot(self.slots);
        self.slots += 1;
        if self.protocol >= 4 {
            self.out.push(op::MEMOIZE);
        } else if let Ok(short) = u8::try_from(slot.0) {
            self.out.extend_from_slice(&[op::BINPUT, short]);
        } else {
            self.out.push(op::LONG_BINPUT);
            self.out.extend_from_slice(&slot.0.to_le_bytes());
        }
        slot
    }

    /// Writes a value again that was kept with [`memoize`](Self::memoize).
    #[inline]
    pub fn get(&mut self, slot: Slot) {
        match u8::try_from(slot.0) {
            Ok(short) => self.out.extend_from_slice(&[op::BINGET, short]),
            Err(_) => {
                let [a, b, c, d] = slot.0.to_le_bytes();
                self.out.extend_from_slice(&[op::LONG_BINGET, a, b, c, d]);
            }
        }
    }

    /// What [`get`](Self::get) writes.
    pub(crate) fn reference(slot: Slot) -> Vec<u8> {
        match u8::try_from(slot.0) {
            Ok(short) => vec![op::BINGET, short],
            Err(_) => [&[op::LONG_BINGET][..], &slot.0.to_le_bytes()].concat(),
        }
    }

    /// `None`.
    pub fn none(&mut self) {
        self.out.push(op::NONE);
    }

    /// A bool.
    pub fn bool(&mut self, value: bool) {
        self.out.push(if value { op::NEWTRUE } else { op::NEWFALSE });
    }

    /// An integer of 64 bits.
    #[inline]
    pub fn int(&mut self, value: i64) {
        if let Ok(v) = u8::try_from(value) {
            self.out.extend_from_slice(&[op::BININT1, v]);
        } else if let Ok(v) = u16::try_from(value) {
            let [a, b] = v.to_le_bytes();
            self.out.extend_from_slice(&[op::BININT2, a, b]);
        } else if let Ok(v) = i32::try_from(value) {
            let [a, b, c, d] = v.to_le_bytes();
            self.out.extend_from_slice(&[op::BININT, a, b, c, d]);
        } else {
            let bytes = value.to_le_bytes();
            // The shortest two's complement: drop bytes that only repeat the sign.
            let mut len = 8;
            let sign = if value < 0 { 0xff } else { 0 };
            while len > 1 && bytes[len - 1] == sign && (bytes[len - 2] ^ sign) & 0x80 == 0 {
                len -= 1;
            }
            self.out.extend_from_slice(&[op::LONG1, len as u8]);
            self.out.extend_from_slice(&bytes[..len]);
        }
    }

    /// An unsigned integer of 64 bits.
    #[inline]
    pub fn uint(&mut self, value: u64) {
        match i64::try_from(value) {
            Ok(value) => self.int(value),
            Err(_) => {
                self.out.extend_from_slice(&[op::LONG1, 9]);
                self.out.extend_from_slice(&value.to_le_bytes());
                self.out.push(0);
            }
        }
    }

    /// An integer of any size.
    pub fn big_int(&mut self, value: &BigInt) -> Result<(), PickleError> {
        if let Ok(small) = i64::try_from(value) {
            self.int(small);
            return Ok(());
        }
        let bytes = value.to_signed_bytes_le();
        match (u8::try_from(bytes.len()), u32::try_from(bytes.len())) {
            (Ok(len), _) => self.out.extend_from_slice(&[op::LONG1, len]),
            (_, Ok(len)) => {
                self.out.push(op::LONG4);
                self.out.extend_from_slice(&len.to_le_bytes());
            }
            _ => {
                let limit = u64::from(u32::MAX);
                return Err(PickleError::Limit { what: "bytes of an integer", limit, at: 0 });
            }
        }
        self.out.extend_from_slice(&bytes);
        Ok(())
    }

    /// A float.
    pub fn float(&mut self, value: f64) {
        self.out.push(op::BINFLOAT);
        self.out.extend_from_slice(&value.to_be_bytes());
    }

    /// A string; one that was written before is referred to.
    pub fn str(&mut self, text: &str) {
        if text.len() > INTERN_UP_TO {
            self.str_once(text);
            return;
        }
        match self.strings.get(text) {
            Some(&slot) => self.get(slot),
            None => {
                self.str_once(text);
                let slot = self.memoize();
                self.strings.insert(text.to_owned(), slot);
            }
        }
    }

    /// A string that the caller keeps account of.
    pub(crate) fn str_once(&mut self, text: &str) {
        self.frame_break();
        match (u8::try_from(text.len()), u32::try_from(text.len())) {
            (Ok(len), _) if self.protocol >= 4 => self.out.extend_from_slice(&[op::SHORT_BINUNICODE, len]),
            (_, Ok(len)) => {
                self.out.push(op::BINUNICODE);
                self.out.extend_from_slice(&len.to_le_bytes());
            }
            _ => {
                // Known to protocol 4 and later; earlier ones can't say it, and nor could CPython.
                self.out.push(op::BINUNICODE8);
                self.out.extend_from_slice(&(text.len() as u64).to_le_bytes());
            }
        }
        self.out.extend_from_slice(text.as_bytes());
    }

    /// A bytes object; protocol 2 has none and writes the call that makes one.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.frame_break();
        if self.protocol < 3 {
            if bytes.is_empty() {
                self.global("builtins", "bytes");
                self.raw(&[op::EMPTY_TUPLE, op::REDUCE]);
                return;
            }
            self.global("_codecs", "encode");
            self.str(&bytes.iter().map(|b| char::from(*b)).collect::<String>());
            self.str("latin1");
            self.raw(&[op::TUPLE2, op::REDUCE]);
            return;
        }
        match (u8::try_from(bytes.len()), u32::try_from(bytes.len())) {
            (Ok(len), _) => self.out.extend_from_slice(&[op::SHORT_BINBYTES, len]),
            (_, Ok(len)) => {
                self.out.push(op::BINBYTES);
                self.out.extend_from_slice(&len.to_le_bytes());
            }
            _ => {
                self.out.push(op::BINBYTES8);
                self.out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
            }
        }
        self.out.extend_from_slice(bytes);
    }

    /// A bytearray.
    pub fn byte_array(&mut self, bytes: &[u8]) {
        if self.protocol >= 5 {
            self.out.push(op::BYTEARRAY8);
            self.out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
            self.out.extend_from_slice(bytes);
            return;
        }
        self.global("builtins", "bytearray");
        if bytes.is_empty() {
            self.raw(&[op::EMPTY_TUPLE, op::REDUCE]);
        } else {
            self.bytes(bytes);
            self.raw(&[op::TUPLE1, op::REDUCE]);
        }
    }

    /// A class or function by name; one that was written before is referred to.
    pub fn global(&mut self, module: &str, name: &str) {
        let key = (module.to_owned(), name.to_owned());
        if let Some(&slot) = self.globals.get(&key) {
            self.get(slot);
            return;
        }
        self.global_once(module, name);
        let slot = self.memoize();
        self.globals.insert(key, slot);
    }

    /// A class or function that the caller keeps account of.
    pub(crate) fn global_once(&mut self, module: &str, name: &str) {
        if self.protocol >= 4 {
            self.str(module);
            self.str(name);
            self.out.push(op::STACK_GLOBAL);
        } else {
            // Protocol 2 uses Python 2's names, which Python 3 translates back.
            let spelled = match module {
                "builtins" if self.protocol < 3 => "__builtin__",
                "copyreg" if self.protocol < 3 => "copy_reg",
                other => other,
            };
            self.out.push(op::GLOBAL);
            self.out.extend_from_slice(spelled.as_bytes());
            self.out.push(b'\n');
            self.out.extend_from_slice(name.as_bytes());
            self.out.push(b'\n');
        }
    }

    /// Opens a stretch of values, to be closed by [`tuple`](Self::tuple) or one of the `…_items`.
    #[inline]
    pub fn mark(&mut self) {
        self.out.push(op::MARK);
    }

    /// An empty list.
    pub fn empty_list(&mut self) {
        self.out.push(op::EMPTY_LIST);
    }

    /// An empty dict.
    #[inline]
    pub fn empty_dict(&mut self) {
        self.out.push(op::EMPTY_DICT);
    }

    /// Appends everything since the mark to the list below it.
    #[inline]
    pub fn append_items(&mut self) {
        self.out.push(op::APPENDS);
    }

    /// Sets the keys and values since the mark in the dict below it.
    #[inline]
    pub fn set_items(&mut self) {
        self.out.push(op::SETITEMS);
    }

    /// Whether a tuple of `len` elements needs a mark before its elements.
    #[inline]
    pub(crate) fn tuple_needs_mark(len: usize) -> bool {
        len > 3
    }

    /// Makes a tuple of the last `len` values; with a mark below them if there are more than three.
    #[inline]
    pub fn tuple(&mut self, len: usize) {
        self.out.push(match len {
            0 => op::EMPTY_TUPLE,
            1 => op::TUPLE1,
            2 => op::TUPLE2,
            3 => op::TUPLE3,
            _ => op::TUPLE,
        });
    }

    /// Calls: the last two values are a function and its tuple of arguments.
    #[inline]
    pub fn reduce(&mut self) {
        self.out.push(op::REDUCE);
    }

    /// Makes an object: the last two values are a class and a tuple of arguments for `__new__`.
    #[inline]
    pub fn new_object(&mut self) {
        self.out.push(op::NEWOBJ);
    }

    /// Gives the last value to the one below it as its state.
    #[inline]
    pub fn build(&mut self) {
        self.out.push(op::BUILD);
    }
}

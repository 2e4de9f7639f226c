//! The instructions that the inner loop of a large `.metadata` doesn't need, and the calls that stand for plain data.

use std::borrow::Cow;

use super::decode::Machine;
use super::document::Made;
use super::error::PickleError;
use super::globals::Builder;
use super::node::{Node, Tag};
use super::opcode as op;
use super::text;

type Result<T> = std::result::Result<T, PickleError>;

impl Machine<'_> {
    /// Everything that the inner loop of a `.metadata` doesn't need.
    #[inline(never)]
    pub(super) fn uncommon(&mut self, opcode: u8) -> Result<()> {
        match opcode {
            op::PROTO => {
                let [version] = self.take_array()?;
                if version > 5 {
                    return Err(PickleError::Protocol { version, at: self.at });
                }
            }
            op::FRAME => {
                let len = u64::from_le_bytes(self.take_array()?);
                self.check_available(len)?;
                if self.frame_end != usize::MAX {
                    return Err(PickleError::Ambiguous { what: "begins a frame inside of another", at: self.at });
                }
                self.frame_end = self.pos + len as usize;
            }
            op::TUPLE => {
                let mark = self.pop_mark()?;
                self.tuple(mark)?;
            }
            op::LIST | op::DICT => {
                let mark = self.pop_mark()?;
                self.container_from(mark, if opcode == op::LIST { Tag::List } else { Tag::Dict })?;
            }
            op::FROZENSET => {
                let mark = self.pop_mark()?;
                self.container_from(mark, Tag::FrozenSet)?;
            }
            op::EMPTY_SET => self.empty(Tag::Set)?,
            op::APPEND => {
                let from = self.below(1)?;
                self.append(from)?;
            }
            op::SETITEM => {
                let from = self.below(2)?;
                self.set_items(from)?;
            }
            op::ADDITEMS => {
                let mark = self.pop_mark()?;
                self.add_items(mark)?;
            }
            op::POP | op::POP_MARK if self.policy.is_strict() => {
                // Picklers write these for values that contain themselves, which plain data never does.
                return Err(PickleError::Ambiguous { what: "drops a value that was made", at: self.at });
            }
            op::POP => {
                // On an empty stretch this takes the mark itself, as CPython does.
                if self.stack.len() > self.fence {
                    self.stack.pop();
                } else {
                    self.pop_mark()?;
                }
            }
            op::POP_MARK => {
                let mark = self.pop_mark()?;
                self.stack.truncate(mark);
            }
            op::DUP => {
                let top = self.top()?;
                self.push(top);
            }
            op::BINUNICODE => {
                let len = u32::from_le_bytes(self.take_array()?);
                self.unicode(u64::from(len))?;
            }
            op::BINUNICODE8 => {
                let len = u64::from_le_bytes(self.take_array()?);
                self.unicode(len)?;
            }
            op::SHORT_BINBYTES | op::BINBYTES | op::BINBYTES8 | op::BYTEARRAY8 => {
                let len = match opcode {
                    op::SHORT_BINBYTES => u64::from(self.take_array::<1>()?[0]),
                    op::BINBYTES => u64::from(u32::from_le_bytes(self.take_array()?)),
                    _ => u64::from_le_bytes(self.take_array()?),
                };
                let (start, len) = self.take_range(len)?;
                let tag = if opcode == op::BYTEARRAY8 { Tag::ByteArray } else { Tag::Bytes };
                let node = self.input_range(tag, start, len)?;
                self.push(node);
            }
            op::LONG1 | op::LONG4 => {
                let len = match opcode {
                    op::LONG1 => u64::from(self.take_array::<1>()?[0]),
                    _ => u64::from(u32::from_le_bytes(self.take_array()?)),
                };
                let (start, len) = self.take_range(len)?;
                let number = text::long_bytes(&self.input[start..start + len], self.at)?;
                self.number(number)?;
            }
            op::BINFLOAT => {
                let value = f64::from_be_bytes(self.take_array()?);
                self.float(value)?;
            }
            op::STACK_GLOBAL => {
                let from = self.below(2)?;
                let (module, name) = (self.stack[from], self.stack[from + 1]);
                let expected = PickleError::Type { expected: "a module and a name as strings", at: self.at };
                let (Some(module), Some(name)) = (self.input_str(module), self.input_str(name)) else {
                    return Err(expected);
                };
                self.stack.truncate(from);
                self.global(module, name)?;
            }
            op::GLOBAL => {
                let (module, name) = (self.line_str()?, self.line_str()?);
                self.global(module, name)?;
            }
            op::INST => {
                let (module, name) = (self.line_str()?, self.line_str()?);
                let mark = self.pop_mark()?;
                self.tuple(mark)?;
                self.global(module, name)?;
                let (class, args) = (self.pop()?, self.pop()?);
                self.object(class, args, Made::Call)?;
            }
            op::OBJ => {
                let mark = self.pop_mark()?;
                if self.stack.len() == mark {
                    return Err(PickleError::StackUnderflow { at: self.at });
                }
                self.tuple(mark + 1)?;
                let (args, class) = (self.pop()?, self.pop()?);
                self.object(class, args, Made::Call)?;
            }
            op::NEWOBJ_EX => {
                self.below(3)?;
                self.tuple_of::<2>()?;
                self.new_object(Made::NewWithKeywords)?;
            }
            op::PERSID => {
                let line = self.line()?;
                let start = self.pos - 1 - line.len();
                std::str::from_utf8(line).map_err(|_| PickleError::Unicode { at: self.at })?;
                let id = self.input_range(Tag::Str, start, line.len())?;
                self.persistent(id)?;
            }
            op::BINPERSID => {
                let id = self.pop()?;
                self.persistent(id)?;
            }
            op::BINPUT => {
                let [index] = self.take_array()?;
                self.memo.put(u64::from(index), self.top()?, self.at)?;
            }
            op::LONG_BINPUT => {
                let index = u32::from_le_bytes(self.take_array()?);
                self.memo.put(u64::from(index), self.top()?, self.at)?;
            }
            op::PUT => {
                let index = text::index(self.line()?, self.at)?;
                self.memo.put(index, self.top()?, self.at)?;
            }
            op::GET => {
                let index = text::index(self.line()?, self.at)?;
                self.recall(index)?;
            }
            op::INT => {
                let number = text::int(self.line()?, self.at)?;
                self.number(number)?;
            }
            op::LONG => {
                let number = text::long(self.line()?, self.at)?;
                self.number(number)?;
            }
            op::FLOAT => {
                let value = text::float(self.line()?, self.at)?;
                self.float(value)?;
            }
            op::UNICODE => {
                let line = self.line()?;
                match text::raw_unicode_escape(line, self.at)? {
                    Cow::Borrowed(line) => {
                        let node = self.input_range(Tag::Str, self.pos - 1 - line.len(), line.len())?;
                        self.push(node);
                    }
                    Cow::Owned(bytes) => self.copied_text(Tag::SideStr, bytes)?,
                }
            }
            op::STRING => {
                let bytes = text::string_literal(self.line()?, self.at)?;
                let tag = if bytes.is_ascii() { Tag::SideStr } else { Tag::SideBytes };
                self.copied_text(tag, bytes)?;
            }
            op::BINSTRING | op::SHORT_BINSTRING => {
                let len = match opcode {
                    op::SHORT_BINSTRING => u64::from(self.take_array::<1>()?[0]),
                    _ => u64::from(u32::from_le_bytes(self.take_array()?)),
                };
                // Python 2's `str`: text where it is ASCII, as Python 3 reads it, otherwise bytes.
                let (start, len) = self.take_range(len)?;
                let ascii = self.input[start..start + len].is_ascii();
                let node = self.input_range(if ascii { Tag::Str } else { Tag::Bytes }, start, len)?;
                self.push(node);
            }
            op::EXT1 | op::EXT2 | op::EXT4 => {
                return Err(PickleError::Unsupported { what: "the extension registry of a process", at: self.at });
            }
            op::NEXT_BUFFER | op::READONLY_BUFFER => {
                return Err(PickleError::Unsupported { what: "an out-of-band buffer", at: self.at });
            }
            _ => {
                return Err(PickleError::Opcode { opcode, at: self.at });
            }
        }
        Ok(())
    }

    /// `_reconstructor(class, object, None)` is `class.__new__(class)`; with another base it stays the call.
    pub(super) fn build_instance(&mut self, reconstructor: Node, args: Node) -> Result<()> {
        let (start, len) = args.as_range();
        let arguments = self.tables.elements.get(start..start + len).unwrap_or(&[]);
        let [class, base, Node::NONE] = *arguments else {
            return self.object(reconstructor, args, Made::Call);
        };
        let base = self.tables.globals.get(base.as_index()).filter(|_| base.tag() == Tag::Global);
        if base.is_some_and(|base| base.is("builtins", "object")) {
            return self.object(class, Node::EMPTY_TUPLE, Made::New);
        }
        self.object(reconstructor, args, Made::Call)
    }

    /// Calls that stand for bytes, sizes and complex numbers in the protocols that have no instruction for them.
    pub(super) fn build_plain(&mut self, builder: Builder, args: Node) -> Result<()> {
        let bad = PickleError::Type { expected: "the arguments that bytes, a size or a complex number is made of", at: self.at };
        if args.tag() != Tag::Tuple {
            return Err(bad);
        }
        let (start, len) = args.as_range();
        let mut arguments = [Node::ABSENT; 2];
        let Some(slots) = arguments.get_mut(..len) else {
            return Err(bad);
        };
        slots.copy_from_slice(self.tables.elements.get(start..start + len).unwrap_or(&[]));
        let (first, second) = (arguments[0], arguments[1]);
        let empty = if builder == Builder::Bytes { Tag::Bytes } else { Tag::ByteArray };
        match (builder, first.tag(), second.tag()) {
            (Builder::Bytes | Builder::ByteArray, Tag::Absent, _) => {
                let node = self.input_range(empty, 0, 0)?;
                self.push(node);
            }
            (Builder::Bytes, Tag::Bytes | Tag::SideBytes, Tag::Absent) => self.push(first),
            (Builder::ByteArray, Tag::Bytes, Tag::Absent) => self.push(first.retagged(Tag::ByteArray)),
            (Builder::ByteArray, Tag::SideBytes, Tag::Absent) => self.push(first.retagged(Tag::SideByteArray)),
            (Builder::ByteArray | Builder::Encode, Tag::Str | Tag::SideStr, Tag::Str | Tag::SideStr) => {
                if !matches!(self.text_of(second), "latin1" | "latin-1") {
                    return Err(bad);
                }
                let bytes = text::latin1(self.text_of(first)).ok_or(bad)?;
                let tag = if builder == Builder::Encode { Tag::SideBytes } else { Tag::SideByteArray };
                self.copied_text(tag, bytes)?;
            }
            (Builder::Size, Tag::Tuple, Tag::Absent) => self.push(first.retagged(Tag::Size)),
            (Builder::Complex, Tag::Float, Tag::Float) => {
                let part = |n: Node| self.tables.floats.get(n.as_index()).copied().unwrap_or_default();
                let value = (part(first), part(second));
                let index = self.table_index(self.tables.complexes.len())?;
                self.tables.complexes.push(value);
                self.push(Node::index(Tag::Complex, index));
            }
            _ => return Err(bad),
        }
        Ok(())
    }
}

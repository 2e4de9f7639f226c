//! The pickle of one contiguous tensor, byte for byte as torch 2.13 makes it.
//!
//! Written out by hand rather than by the pickle encoder, because a checkpoint has one per chunk and it is
//! the same but for the type and a few numbers.

use crate::DType;

/// Appends `data.pkl` of a record with one tensor whose storage is `data/0`; the sizes have been checked.
pub(crate) fn push_tensor_pickle(out: &mut Vec<u8>, dtype: DType, shape: &[u64], requires_grad: bool) {
    let elements: u64 = shape.iter().product();
    // The storage counts elements if it has a type, else bytes.
    let (rebuild, class, storage_len) = match dtype.storage_class() {
        Some(class) => ("_rebuild_tensor_v2\nq\0", class, elements),
        None => ("_rebuild_tensor_v3\nq\0", "UntypedStorage", elements * dtype.size()),
    };
    let module = match dtype.storage_class() {
        Some(_) => "torch\n",
        None => "torch.storage\n",
    };
    out.extend_from_slice(b"\x80\x02ctorch._utils\n");
    out.extend_from_slice(rebuild.as_bytes());
    out.extend_from_slice(b"((X\x07\0\0\0storageq\x01c");
    out.extend_from_slice(module.as_bytes());
    out.extend_from_slice(class.as_bytes());
    out.extend_from_slice(b"\nq\x02X\x01\0\0\x000q\x03X\x03\0\0\0cpuq\x04");
    push_int(out, storage_len);
    out.extend_from_slice(b"tq\x05QK\0");
    let mut memo = 6;
    push_tuple(out, &mut memo, shape, shape.iter().copied());
    // Torch's strides of a contiguous tensor treat an empty dimension as if it had one element.
    let spread: u64 = shape.iter().map(|&size| size.max(1)).product();
    let strides = shape.iter().scan(spread, |stride, &size| {
        *stride /= size.max(1);
        Some(*stride)
    });
    push_tuple(out, &mut memo, shape, strides);
    out.push(if requires_grad { 0x88 } else { 0x89 });
    out.extend_from_slice(b"ccollections\nOrderedDict\n");
    push_memo(out, &mut memo);
    out.extend_from_slice(b")R");
    push_memo(out, &mut memo);
    if dtype.storage_class().is_none() {
        out.extend_from_slice(b"ctorch\n");
        out.extend_from_slice(dtype.name().as_bytes());
        out.push(b'\n');
        push_memo(out, &mut memo);
    }
    out.push(b't');
    push_memo(out, &mut memo);
    out.push(b'R');
    push_memo(out, &mut memo);
    out.push(b'.');
}

fn push_memo(out: &mut Vec<u8>, memo: &mut u8) {
    out.extend_from_slice(&[b'q', *memo]);
    *memo += 1;
}

fn push_tuple(out: &mut Vec<u8>, memo: &mut u8, shape: &[u64], values: impl Iterator<Item = u64>) {
    let close = match shape.len() {
        0 => {
            out.push(b')');
            return;
        }
        1 => 0x85,
        2 => 0x86,
        3 => 0x87,
        _ => {
            out.push(b'(');
            b't'
        }
    };
    values.for_each(|value| push_int(out, value));
    out.push(close);
    push_memo(out, memo);
}

fn push_int(out: &mut Vec<u8>, value: u64) {
    let bytes = value.to_le_bytes();
    if value < 1 << 8 {
        out.extend_from_slice(&[b'K', bytes[0]]);
    } else if value < 1 << 16 {
        out.extend_from_slice(&[b'M', bytes[0], bytes[1]]);
    } else if value < 1 << 31 {
        out.push(b'J');
        out.extend_from_slice(&bytes[..4]);
    } else {
        // LONG1: little-endian two's complement, as short as the sign bit allows.
        let len = (64 - value.leading_zeros()) / 8 + 1;
        out.extend_from_slice(&[0x8a, len as u8]);
        out.extend_from_slice(&bytes[..len.min(8) as usize]);
        if len == 9 {
            out.push(0);
        }
    }
}

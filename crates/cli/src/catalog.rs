//! Facts of a checkpoint's catalog that several verbs and the report show.

use reshard::checkpoint::{ChunkLocation, Format};

/// The format in words.
pub(crate) fn format_name(format: Format) -> &'static str {
    match format {
        Format::Dcp => "DCP",
        Format::Safetensors => "safetensors",
        Format::Torch => "torch.save",
        Format::DeepSpeed => "DeepSpeed ZeRO",
        Format::Universal => "DeepSpeed universal",
        Format::Megatron => "Megatron",
        Format::Ranks => "one file a rank",
        Format::Accelerate => "accelerate",
        Format::Lightning => "Lightning",
        Format::Nanotron => "nanotron",
        Format::TorchCheckpointing => "torch_checkpointing",
        _ => "unknown",
    }
}

/// Where a chunk's bytes lie, and how many they are.
pub(crate) fn location(location: &ChunkLocation) -> (u64, u64) {
    match location {
        ChunkLocation::Record { offset, length, .. } => (*offset, *length),
        ChunkLocation::Data(data) => (data.layout.base(), data.layout.end().saturating_sub(data.layout.base())),
        ChunkLocation::Seen(seen) => self::location(&seen.stored),
        _ => (0, 0),
    }
}

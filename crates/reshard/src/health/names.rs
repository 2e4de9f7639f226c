//! What tensors are, told by their names.

/// Averages and counts that models keep beside their weights; no optimizer trains them, and some of them grow.
const BUFFERS: &[&str] = &[
    "running_mean",
    "running_var",
    "num_batches_tracked",
    "tokens_per_expert",
    "local_tokens_per_expert",
    "expert_bias",
    "inv_freq",
    "position_ids",
    "cos_cached",
    "sin_cached",
    "freqs_cis",
    "freqs",
    "expert_counts",
    "cluster_size",
    "embed_avg",
];

fn last(key: &str) -> &str {
    key.rsplit('.').next().unwrap_or(key)
}

/// Whether it is a bias, which starts at zero.
pub(super) fn is_bias(key: &str) -> bool {
    let name = last(key);
    name == "bias" || name.ends_with("_bias")
}

/// Whether it is what a model adds to scores so that some do not count: zero, or hugely negative.
pub(super) fn is_mask(key: &str) -> bool {
    last(key).split('_').any(|word| matches!(word, "mask" | "masked" | "masks" | "causal" | "alibi"))
}

/// Whether it is no weight, but a buffer beside them.
pub(super) fn is_buffer(key: &str) -> bool {
    BUFFERS.contains(&last(key)) || is_mask(key)
}

/// Whether it is called what weights are called. Of a model whose trained parameters are known, others that are not are buffers.
pub(super) fn is_called_weight(key: &str) -> bool {
    last(key).split('_').any(|word| matches!(word, "weight" | "weights" | "bias" | "kernel" | "proj" | "embedding"))
}

/// Whether it is the factor of a LoRA adapter that starts at zero.
pub(super) fn starts_at_zero(key: &str) -> bool {
    key.split('.').any(|part| matches!(part, "lora_B" | "lora_embedding_B" | "lora_b" | "lora_up"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_what_is_no_weight() {
        assert!(
            is_buffer("bn.running_var")
                && is_buffer("attn.causal_mask")
                && is_buffer("mask")
                && is_buffer("h.0.attn.masked_bias")
        );
        assert!(!is_buffer("attn.weight") && !is_buffer("unmasking.weight") && !is_buffer("running_var.weight"));
        assert!(is_buffer("vq.cluster_size") && is_buffer("attn.causal") && !is_buffer("causal.weight"));
        assert!(is_called_weight("h.0.in_proj_weight") && is_called_weight("fc.bias") && !is_called_weight("obs_rms.var"));
        assert!(is_bias("a.bias") && is_bias("a.in_proj_bias") && !is_bias("bias.weight"));
        assert!(starts_at_zero("q.lora_B.default.weight") && !starts_at_zero("q.lora_A.weight"));
    }
}

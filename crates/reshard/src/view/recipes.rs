//! Rules that come with reshard.

/// A recipe: rules for a pair of libraries and a family of models.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Recipe {
    /// What it is called.
    pub name: &'static str,
    /// What it is for.
    pub description: &'static str,
    /// Numbers that it needs.
    pub parameters: &'static [&'static str],
    /// Its rules.
    pub text: &'static str,
}

macro_rules! recipes {
    ($($name:literal, $description:literal, [$($parameter:literal),*];)+) => {
        &[$(Recipe {
            name: $name,
            description: $description,
            parameters: &[$($parameter),*],
            text: include_str!(concat!("recipes/", $name, ".toml")),
        }),+]
    };
}

const RECIPES: &[Recipe] = recipes! {
    "block-scaled-float8", "Linear layers of a Hugging Face model, bfloat16 to block-scaled float8", [];
    "deepseek-v3-hf-to-megatron", "DeepSeek V3, Hugging Face to Megatron core", [];
    "deepseek-v3-hf-to-torchtitan", "DeepSeek V3, Hugging Face to torchtitan", [];
    "deepseek-v3-mtp-hf-to-megatron", "DeepSeek V3, its layer that predicts a second token, Hugging Face to Megatron core", [];
    "dequantise", "Block-scaled weights (float8, MXFP4) as bfloat16", [];
    "llama3-hf-to-megatron", "Llama 3, Hugging Face to Megatron core", ["heads", "kv_heads"];
    "llama3-hf-to-torchtitan", "Llama 3, Hugging Face to torchtitan", ["heads", "kv_heads"];
    "lora-merge", "A model saved inside PEFT's wrapper, to the model with its LoRA updates added", ["alpha", "rank"];
    "lora-split", "A model saved inside PEFT's wrapper, to its LoRA adapter alone", [];
    "megatron-fuse-norms", "Megatron core, names of the local layer spec to those of Transformer Engine", [];
    "megatron-group-experts", "Megatron core, experts under the names of Transformer Engine's grouped layers", [];
    "megatron-grouped-gemm", "Megatron core, experts as its GroupedMLP has them", ["experts", "hidden"];
    "megatron-stack-experts", "Megatron core, all experts of a layer in one tensor", [];
    "megatron-stack-layers", "Megatron core, all layers of a kind in one tensor", [];
    "pipeline-stages-merge", "Pipeline stages with layers numbered from 0 in each, to one model", ["per_stage"];
    "qwen3-hf-to-megatron", "Qwen 3 (dense and MoE), Hugging Face to Megatron core", ["heads", "kv_heads"];
    "qwen3-hf-to-torchtitan", "Qwen 3 (dense and MoE), Hugging Face to torchtitan", [];
    "vocabulary-resize", "More rows for embeddings and head, of zeros, with the optimizer's moments alike", ["from", "to"];
};

/// All recipes, by name.
pub fn recipes() -> &'static [Recipe] {
    RECIPES
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::view::View;

    #[test]
    fn every_recipe_can_be_read_says_what_it_is_for_and_has_a_reverse_where_there_can_be_one() {
        for recipe in recipes() {
            let parameters: BTreeMap<String, i64> = recipe.parameters.iter().map(|name| ((*name).to_owned(), 4)).collect();
            let view = View::recipe(recipe.name, &parameters).unwrap();
            // What a sum was made of nothing brings back.
            assert_eq!(view.reversed().is_ok(), recipe.name != "lora-merge", "{}", recipe.name);
            assert!(recipe.text.contains(&format!("description = {:?}", recipe.description)), "{}", recipe.name);
        }
        assert!(View::recipe("llama", &BTreeMap::new()).unwrap_err().to_string().contains("llama3-hf-to-torchtitan"));
    }
}

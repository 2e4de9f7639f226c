//! What the names of nanotron's files say.

/// A file's place in the grid of model parallel ranks. A weight that is not cut has one file, of rank 0 of 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Shard {
    pub(super) expert: u64,
    pub(super) experts: u64,
    pub(super) tensor: u64,
    pub(super) tensors: u64,
    pub(super) stage: u64,
}

/// A file of the optimizer, or of what is saved like it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RankFile {
    pub(super) stage: u64,
    pub(super) stages: u64,
    pub(super) tensor: u64,
    pub(super) tensors: u64,
    pub(super) expert: u64,
    pub(super) experts: u64,
    pub(super) data: u64,
    /// 0 where data parallel ranks share a file.
    pub(super) replicas: u64,
}

fn number(text: &str) -> Option<u64> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// `3-of-4`, where 3 is less than 4.
fn of(text: &str) -> Option<(u64, u64)> {
    let (at, count) = text.split_once("-of-")?;
    let (at, count) = (number(at)?, number(count)?);
    (at < count).then_some((at, count))
}

/// The weight and the shard of a file `model/a/b/model_weight_pp-rank-0-of-1_tp-rank-0-of-2[_exp-rank-0-of-4].safetensors`.
pub(super) fn weight_file(path: &str) -> Option<(String, Shard)> {
    let path = path.strip_prefix("model/")?.strip_suffix(".safetensors")?;
    let (folder, file) = path.rsplit_once('/').unwrap_or(("", path));
    let file = file.strip_prefix("model_")?;
    let whole = Shard { expert: 0, experts: 1, tensor: 0, tensors: 1, stage: 0 };
    let (name, shard) = match file.split_once("_pp-rank-") {
        None => (file, whole),
        Some((name, ranks)) => {
            let (stage, ranks) = ranks.split_once("_tp-rank-")?;
            let (tensor, expert) = ranks.split_once("_exp-rank-").unwrap_or((ranks, "0-of-1"));
            let ((stage, _), (tensor, tensors), (expert, experts)) = (of(stage)?, of(tensor)?, of(expert)?);
            (name, Shard { expert, experts, tensor, tensors, stage })
        }
    };
    let name = if folder.is_empty() { name.to_owned() } else { format!("{}.{name}", folder.replace('/', ".")) };
    Some((name, shard))
}

/// The file of another rank, named like this one.
pub(super) fn like(path: &str, tensor: u64, expert: u64) -> String {
    let replaced = |path: &str, word: &str, rank: u64| match path.split_once(word) {
        Some((before, after)) => {
            let rest = after.find("-of-").map_or("", |at| &after[at..]);
            format!("{before}{word}{rank}{rest}")
        }
        None => path.to_owned(),
    };
    replaced(&replaced(path, "_tp-rank-", tensor), "_exp-rank-", expert)
}

/// The rank of a file `optimizer/optimizer_pp-0-of-1[_dp-0-of-2]_tp-0-of-1_exp-0-of-1.pt`.
pub(super) fn optimizer_file(path: &str) -> Option<RankFile> {
    let ranks = path.strip_prefix("optimizer/optimizer_pp-")?.strip_suffix(".pt")?;
    let (ranks, expert) = ranks.split_once("_exp-").unwrap_or((ranks, "0-of-1"));
    let (ranks, tensor) = ranks.split_once("_tp-")?;
    let (stage, data) = match ranks.split_once("_dp-") {
        Some((stage, data)) => (stage, of(data)?),
        None => (ranks, (0, 0)),
    };
    let ((stage, stages), (tensor, tensors), (expert, experts), (data, replicas)) = (of(stage)?, of(tensor)?, of(expert)?, data);
    Some(RankFile { stage, stages, tensor, tensors, expert, experts, data, replicas })
}

/// The name of a rank's file.
pub(super) fn optimizer_name(rank: &RankFile) -> String {
    let RankFile { stage, stages, tensor, tensors, expert, experts, data, replicas } = rank;
    let data = if *replicas == 0 { String::new() } else { format!("_dp-{data}-of-{replicas}") };
    format!("optimizer/optimizer_pp-{stage}-of-{stages}{data}_tp-{tensor}-of-{tensors}_exp-{expert}-of-{experts}.pt")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_weight_and_ranks() {
        let whole = Shard { expert: 0, experts: 1, tensor: 0, tensors: 1, stage: 0 };
        let file = "model/model/decoder/0/model_weight.safetensors";
        assert_eq!(weight_file(file), Some(("model.decoder.0.weight".into(), whole)));
        let file = "model/a/model_w_pp-rank-1-of-2_tp-rank-3-of-4.safetensors";
        assert_eq!(weight_file(file), Some(("a.w".into(), Shard { tensor: 3, tensors: 4, stage: 1, ..whole })));
        assert_eq!(like(file, 0, 0), "model/a/model_w_pp-rank-1-of-2_tp-rank-0-of-4.safetensors");
        let file = "model/a/model_w_pp-rank-0-of-1_tp-rank-0-of-1_exp-rank-2-of-8.safetensors";
        assert_eq!(weight_file(file), Some(("a.w".into(), Shard { expert: 2, experts: 8, ..whole })));
        for file in ["model/w.safetensors", "model/model_w_pp-rank-0-of-1.safetensors", "model/model_w.pt"] {
            assert_eq!(weight_file(file), None, "{file}");
        }
        assert_eq!(weight_file("model/a/model_w_pp-rank-0-of-1_tp-rank-4-of-4.safetensors"), None);
    }

    #[test]
    fn names_of_the_optimizer_go_both_ways() {
        for file in [
            "optimizer/optimizer_pp-1-of-2_dp-3-of-4_tp-0-of-2_exp-0-of-1.pt",
            "optimizer/optimizer_pp-0-of-1_tp-1-of-2_exp-0-of-1.pt",
        ] {
            assert_eq!(optimizer_name(&optimizer_file(file).unwrap()), file);
        }
        assert_eq!(optimizer_file("optimizer/optimizer_pp-1-of-1_tp-0-of-1.pt"), None);
    }
}

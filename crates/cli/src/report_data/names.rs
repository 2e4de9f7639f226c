//! What to call a checkpoint: a folder called `checkpoint` says nothing by itself, and two that are compared need names that
//! tell them apart.

fn parts(path: &str) -> Vec<&str> {
    let path = path.split_once("://").map_or(path, |(_, rest)| rest);
    path.split(['/', '\\']).filter(|part| !part.is_empty() && *part != ".").collect()
}

/// The last two parts of a path.
pub(super) fn title(path: &str) -> String {
    match &parts(path)[..] {
        [.., parent, name] => format!("{parent}/{name}"),
        [name] => (*name).to_owned(),
        [] => path.to_owned(),
    }
}

/// The last parts in which two paths differ; where they do not, A and B.
pub(super) fn apart(a: &str, b: &str) -> (String, String) {
    let (a, b) = (parts(a), parts(b));
    let same = a.iter().rev().zip(b.iter().rev()).take_while(|(a, b)| a == b).count();
    let at = |parts: &[&str]| parts.len().checked_sub(same + 1).and_then(|last| parts.get(last)).map(|part| (*part).to_owned());
    match (at(&a), at(&b)) {
        (Some(a), Some(b)) => (a, b),
        (Some(a), None) => (a, "the other".to_owned()),
        (None, Some(b)) => ("this".to_owned(), b),
        (None, None) => ("A".to_owned(), "B".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_parts_make_a_title() {
        assert_eq!(title("/runs/llama/checkpoint/"), "llama/checkpoint");
        assert_eq!(title("s3://bucket/step-100"), "bucket/step-100");
        assert_eq!(title("model.pt"), "model.pt");
        assert_eq!(title("./a/b"), "a/b");
    }

    #[test]
    fn what_is_compared_is_told_apart() {
        let apart = |a, b| apart(a, b);
        assert_eq!(apart("run/step-1", "run/step-2"), ("step-1".into(), "step-2".into()));
        assert_eq!(apart("x/one/checkpoint", "x/two/checkpoint/"), ("one".into(), "two".into()));
        assert_eq!(apart("a/b", "a/b"), ("A".into(), "B".into()));
        assert_eq!(apart("b", "a/b"), ("this".into(), "a".into()));
    }
}

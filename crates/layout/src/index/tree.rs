//! The general case: a binary tree of bounding boxes over any regions, packed into flat arrays. Each node halves its
//! regions at the median centre of the dimension along which the most of them lie side by side, so pieces of flat
//! ranges, boxes of uneven sizes and overlapping regions are all found by descending into few nodes.

use smallvec::SmallVec;

use crate::Region;

/// Regions per leaf: few enough that testing them costs less than another level.
const LEAF: usize = 8;

/// Regions that are asked along which dimension to halve a node.
const SAMPLE: usize = 128;

#[derive(Clone, Debug)]
pub(super) struct Tree {
    ndim: usize,
    /// Positions of the non-empty regions, leaf by leaf.
    order: Vec<u32>,
    /// Per node, in preorder: the start of each dimension's interval, then the ends.
    bounds: Vec<u64>,
}

/// A node: its regions are a stretch of `order`, its left child is the next node.
#[derive(Clone, Copy)]
struct Node {
    number: usize,
    start: usize,
    end: usize,
}

impl Node {
    fn len(self) -> usize {
        self.end - self.start
    }

    fn children(self) -> Option<(Node, Node)> {
        if self.len() <= LEAF {
            return None;
        }
        let middle = self.start + self.len() / 2;
        let left = Node { number: self.number + 1, start: self.start, end: middle };
        let right = Node { number: left.number + node_count(left.len()), start: middle, end: self.end };
        Some((left, right))
    }
}

/// How many nodes a subtree over `len` regions has. A length splits into two that differ by at most one, so each
/// level has at most two distinct lengths.
fn node_count(len: usize) -> usize {
    // (length, how often it occurs) and the same for length + 1.
    let (mut small, mut few, mut many, mut total) = (len, 1usize, 0usize, 0usize);
    loop {
        total += few + many;
        // Nodes of length `small` and `small + 1`; those above the leaf size have children.
        let (few_parents, many_parents) = (if small > LEAF { few } else { 0 }, if small + 1 > LEAF { many } else { 0 });
        if few_parents + many_parents == 0 {
            return total;
        }
        let half = small / 2;
        if small.is_multiple_of(2) {
            // small → half, half; small + 1 → half, half + 1.
            (few, many) = (2 * few_parents + many_parents, many_parents);
        } else {
            // small → half, half + 1; small + 1 → half + 1, half + 1.
            (few, many) = (few_parents, few_parents + 2 * many_parents);
        }
        small = half;
    }
}

/// The dimension along which a node's regions are spread most, by a sample of them.
fn most_spread(order: &[u32], regions: &[Region], mean_sizes: &[f64]) -> Option<usize> {
    let mut centres: SmallVec<[(f64, f64); 4]> = SmallVec::from_elem((f64::INFINITY, 0.0), mean_sizes.len());
    for index in order.iter().step_by(order.len() / SAMPLE + 1) {
        for ((least, most), (start, end)) in centres.iter_mut().zip(regions[*index as usize].intervals()) {
            let centre = start as f64 + (end - start) as f64 / 2.0;
            (*least, *most) = (least.min(centre), most.max(centre));
        }
    }
    let spread = |dim: &usize| (centres[*dim].1 - centres[*dim].0) / mean_sizes[*dim];
    (0..mean_sizes.len()).max_by(|a, b| spread(a).total_cmp(&spread(b)))
}

impl Tree {
    pub(super) fn new(ndim: usize, regions: &[Region]) -> Tree {
        let order: Vec<u32> = (0u32..).zip(regions).filter(|(_, region)| !region.is_empty()).map(|(index, _)| index).collect();
        // A dimension counts by how many average regions fit along it.
        let mut mean_sizes: SmallVec<[f64; 4]> = SmallVec::from_elem(0.0, ndim);
        for index in &order {
            for (mean, size) in mean_sizes.iter_mut().zip(regions[*index as usize].sizes()) {
                *mean += *size as f64;
            }
        }
        for mean in &mut mean_sizes {
            *mean /= order.len().max(1) as f64;
        }
        let root = Node { number: 0, start: 0, end: order.len() };
        let bounds = vec![0; node_count(root.len()) * 2 * ndim];
        let mut tree = Tree { ndim, order, bounds };
        let mut parents = Vec::new();
        let mut stack = vec![root];
        while let Some(node) = stack.pop() {
            let Some((left, right)) = node.children() else {
                tree.bound_leaf(node, regions);
                continue;
            };
            let stretch = &mut tree.order[node.start..node.end];
            let spread = most_spread(stretch, regions, &mean_sizes);
            stretch.select_nth_unstable_by_key(left.len(), |index| {
                let region = &regions[*index as usize];
                // The centre, doubled; ends fit in 64 bits but their sum may not.
                spread.map_or(0, |dim| u128::from(region.offsets()[dim]) + u128::from(region.end(dim)))
            });
            parents.push((node, left, right));
            stack.push(right);
            stack.push(left);
        }
        // Children come after their parents.
        for (node, left, right) in parents.into_iter().rev() {
            for at in 0..2 * ndim {
                let ends = [left, right].map(|child| tree.bounds[child.number * 2 * ndim + at]);
                let joined = if at < ndim { ends[0].min(ends[1]) } else { ends[0].max(ends[1]) };
                tree.bounds[node.number * 2 * ndim + at] = joined;
            }
        }
        tree
    }

    fn bound_leaf(&mut self, node: Node, regions: &[Region]) {
        let ndim = self.ndim;
        let at = node.number * 2 * ndim;
        let (starts, ends) = self.bounds[at..at + 2 * ndim].split_at_mut(ndim);
        starts.fill(u64::MAX);
        for index in &self.order[node.start..node.end] {
            for (dim, (start, end)) in regions[*index as usize].intervals().enumerate() {
                starts[dim] = starts[dim].min(start);
                ends[dim] = ends[dim].max(end);
            }
        }
    }

    pub(super) fn for_each(&self, wanted: &Region, visit: &mut impl FnMut(usize)) {
        let mut stack: SmallVec<[Node; 64]> = SmallVec::new();
        stack.push(Node { number: 0, start: 0, end: self.order.len() });
        while let Some(node) = stack.pop() {
            if !self.meets(node, wanted) {
                continue;
            }
            match node.children() {
                Some((left, right)) => {
                    stack.push(right);
                    stack.push(left);
                }
                None => self.order[node.start..node.end].iter().for_each(|index| visit(*index as usize)),
            }
        }
    }

    fn meets(&self, node: Node, wanted: &Region) -> bool {
        let at = node.number * 2 * self.ndim;
        let (starts, ends) = self.bounds[at..at + 2 * self.ndim].split_at(self.ndim);
        node.len() > 0 && wanted.intervals().zip(starts.iter().zip(ends)).all(|((a, b), (start, end))| a < *end && *start < b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_counts_match_the_tree_that_children_build() {
        fn walk(node: Node) -> usize {
            node.children().map_or(1, |(left, right)| 1 + walk(left) + walk(right))
        }
        for len in (0..400).chain([4095, 4096, 4097, 100_003]) {
            assert_eq!(node_count(len), walk(Node { number: 0, start: 0, end: len }), "{len} regions");
        }
    }
}

//! Makes [`ReportData`] small: tensors that are cut alike share a tiling, and those whose chunks are dealt to files
//! alike share a row of holders. A cut along a grid is kept as the cut positions of each dimension.

use std::collections::HashMap;

use super::data::{Checkpoint, Cuts, Diff, FileInfo, Optimizer, PlainValue, ReportData, SCHEMA, Tiling};
use super::health::{Checks, Health, Numbers, Stats};

/// Past this many chunks the page leaves out where each one lies in its file.
const MOST_PLACES: usize = 60_000;

/// One chunk of a tensor.
#[derive(Clone, Copy, Debug)]
pub struct ChunkInput<'a> {
    /// Offset of the chunk in each dimension.
    pub offsets: &'a [u64],
    /// Size of the chunk in each dimension.
    pub sizes: &'a [u64],
    /// The file that holds it: a number that [`ReportBuilder::file`] gave.
    pub file: u32,
    /// Offset and length of its record in that file.
    pub location: Option<(u64, u64)>,
}

/// One tensor.
#[derive(Clone, Copy, Debug)]
pub struct TensorInput<'a> {
    /// Its key.
    pub key: &'a str,
    /// The name of its element type.
    pub dtype: &'a str,
    /// Its shape.
    pub shape: &'a [u64],
    /// Bytes of the whole tensor.
    pub bytes: u64,
    /// Its chunks, in any order.
    pub chunks: &'a [ChunkInput<'a>],
}

/// Collects what a report shows.
#[derive(Debug, Default)]
pub struct ReportBuilder {
    data: ReportData,
    dtypes: HashMap<String, u32>,
    tilings: HashMap<Tiling, u32>,
    holders: HashMap<Vec<u32>, u32>,
    places: usize,
}

impl ReportBuilder {
    /// Starts a report on a checkpoint.
    pub fn new(checkpoint: Checkpoint) -> Self {
        Self { data: ReportData { schema: SCHEMA, checkpoint, ..ReportData::default() }, ..Self::default() }
    }

    /// Adds a data file and gives its number.
    pub fn file(&mut self, path: impl Into<String>, bytes: u64, rank: Option<u32>) -> u32 {
        let path = path.into();
        self.data.files.push(FileInfo { path, bytes, rank });
        last_index(self.data.files.len())
    }

    /// Adds a tensor and gives its number.
    pub fn tensor(&mut self, tensor: TensorInput<'_>) -> u32 {
        let mut chunks: Vec<&ChunkInput<'_>> = tensor.chunks.iter().collect();
        // The order in which a grid is read, so that its chunks need no coordinates of their own.
        chunks.sort_by_key(|chunk| chunk.offsets);
        let tiling = Tiling { shape: tensor.shape.to_vec(), cuts: cuts(tensor.shape, &chunks) };
        let tiling = intern(&mut self.tilings, &mut self.data.tilings, tiling);
        let files = chunks.iter().map(|chunk| chunk.file).collect();
        let holders = intern(&mut self.holders, &mut self.data.holders, files);
        let dtype = intern(&mut self.dtypes, &mut self.data.dtypes, tensor.dtype.to_owned());

        let columns = &mut self.data.tensors;
        columns.key.push(tensor.key.to_owned());
        columns.dtype.push(dtype);
        columns.bytes.push(tensor.bytes);
        columns.tiling.push(tiling);
        columns.holders.push(holders);
        let number = last_index(columns.key.len());

        self.places = self.places.saturating_add(chunks.len());
        if self.places > MOST_PLACES {
            self.data.places.clear();
        } else if !chunks.is_empty()
            && let Some(places) = chunks.iter().map(|chunk| chunk.location).collect::<Option<Vec<_>>>()
        {
            let flat = places.into_iter().flat_map(|(at, len)| [at, len]).collect();
            self.data.places.insert(number, flat);
        }
        number
    }

    /// Adds statistics of a tensor's values.
    pub fn stats(&mut self, tensor: u32, stats: Stats) -> &mut Self {
        self.data.numbers.get_or_insert_default().stats.insert(tensor, stats);
        self
    }

    /// Adds what the values of all tensors look like.
    pub fn numbers(&mut self, numbers: Numbers) -> &mut Self {
        self.data.numbers = Some(numbers);
        self
    }

    /// Sets the verdict.
    pub fn health(&mut self, health: Health) -> &mut Self {
        self.data.checkpoint.health = health;
        self
    }

    /// Adds a plain value.
    pub fn value(&mut self, value: PlainValue) -> &mut Self {
        self.data.values.push(value);
        self
    }

    /// Adds the optimizer's state.
    pub fn optimizer(&mut self, optimizer: Optimizer) -> &mut Self {
        self.data.optimizer = Some(optimizer);
        self
    }

    /// Says how many plain values there are, if the page does not hold all.
    pub fn values_found(&mut self, found: u64) -> &mut Self {
        self.data.values_found = Some(found).filter(|found| *found > self.data.values.len() as u64);
        self
    }

    /// Adds the state of the optimizer of what it is compared with.
    pub fn other_optimizer(&mut self, optimizer: Optimizer) -> &mut Self {
        self.data.other_optimizer = Some(optimizer);
        self
    }

    /// Says why two checkpoints could not be compared.
    pub fn not_compared(&mut self, why: String) -> &mut Self {
        self.data.not_compared = Some(why);
        self
    }

    /// Adds the difference to another checkpoint.
    pub fn diff(&mut self, diff: Diff) -> &mut Self {
        self.data.diff = Some(diff);
        self
    }

    /// Sets the verdict on what it is compared with.
    pub fn other_health(&mut self, health: Health) -> &mut Self {
        self.data.other_health = Some(health);
        self
    }

    /// Says whether a server will answer the page.
    pub fn live(&mut self, live: bool) -> &mut Self {
        self.data.live = live;
        self
    }

    /// The report's data.
    pub fn finish(mut self) -> ReportData {
        // What is compared is judged, if by nothing but its numbers.
        if self.data.diff.is_some() && self.data.other_health.is_none() {
            let numbers = self.data.numbers.as_ref().and_then(|numbers| numbers.other_check.clone()).unwrap_or_default();
            self.data.other_health = Some(Health::of(Checks { numbers, ..Checks::default() }, Vec::new()));
        }
        self.data
    }
}

fn last_index(len: usize) -> u32 {
    u32::try_from(len.saturating_sub(1)).unwrap_or(u32::MAX)
}

fn intern<T: Clone + Eq + std::hash::Hash>(known: &mut HashMap<T, u32>, table: &mut Vec<T>, item: T) -> u32 {
    if let Some(&row) = known.get(&item) {
        return row;
    }
    table.push(item.clone());
    let row = last_index(table.len());
    known.insert(item, row);
    row
}

/// The shortest description of chunks that are sorted by their offsets.
fn cuts(shape: &[u64], chunks: &[&ChunkInput<'_>]) -> Cuts {
    if let [only] = chunks
        && only.sizes == shape
        && only.offsets.iter().all(|&offset| offset == 0)
    {
        return Cuts::Whole;
    }
    if let Some(grid) = grid(shape, chunks) {
        return Cuts::Grid(grid);
    }
    let mut flat = Vec::with_capacity(chunks.len().saturating_mul(shape.len()).saturating_mul(2));
    for chunk in chunks {
        flat.extend_from_slice(chunk.offsets);
        flat.extend_from_slice(chunk.sizes);
    }
    Cuts::Boxes(flat)
}

/// The cut positions of each dimension, if the chunks are exactly the cells of a grid.
fn grid(shape: &[u64], chunks: &[&ChunkInput<'_>]) -> Option<Vec<Vec<u64>>> {
    let mut cuts = Vec::with_capacity(shape.len());
    let mut cells: usize = 1;
    for (dim, &size) in shape.iter().enumerate() {
        let mut starts = chunks.iter().map(|chunk| chunk.offsets.get(dim).copied()).collect::<Option<Vec<u64>>>()?;
        starts.sort_unstable();
        starts.dedup();
        if starts.first() != Some(&0) || starts.last() >= Some(&size) {
            return None;
        }
        cells = cells.checked_mul(starts.len())?;
        if cells > chunks.len() {
            return None;
        }
        starts.push(size);
        cuts.push(starts);
    }
    if cells != chunks.len() {
        return None;
    }
    // As many cells as chunks, in the same order: now each chunk must be its cell.
    let mut at = vec![0_usize; shape.len()];
    for chunk in chunks {
        for (dim, &i) in at.iter().enumerate() {
            let (start, end) = (cuts[dim][i], cuts[dim][i + 1]);
            if chunk.offsets.get(dim) != Some(&start) || chunk.sizes.get(dim) != Some(&(end - start)) {
                return None;
            }
        }
        for dim in (0..at.len()).rev() {
            at[dim] += 1;
            if at[dim] + 1 < cuts[dim].len() {
                break;
            }
            at[dim] = 0;
        }
    }
    Some(cuts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(builder: &mut ReportBuilder, key: &str, shape: &[u64], boxes: &[(&[u64], &[u64], u32)]) -> u32 {
        let chunks: Vec<_> =
            boxes.iter().map(|&(offsets, sizes, file)| ChunkInput { offsets, sizes, file, location: Some((7, 9)) }).collect();
        builder.tensor(TensorInput { key, dtype: "float32", shape, bytes: 4, chunks: &chunks })
    }

    #[test]
    fn a_grid_in_any_order_is_kept_as_cuts_and_shared() {
        let mut builder = ReportBuilder::new(Checkpoint::default());
        let cells: [(&[u64], &[u64], u32); 4] =
            [(&[0, 0], &[3, 4], 0), (&[0, 4], &[3, 2], 1), (&[3, 0], &[2, 4], 2), (&[3, 4], &[2, 2], 3)];
        let mut shuffled = cells;
        shuffled.swap(0, 3);
        shuffled.swap(1, 2);
        add(&mut builder, "a", &[5, 6], &cells);
        add(&mut builder, "b", &[5, 6], &shuffled);
        let data = builder.finish();
        assert_eq!(data.tilings.len(), 1);
        assert_eq!(data.tilings[0].cuts, Cuts::Grid(vec![vec![0, 3, 5], vec![0, 4, 6]]));
        assert_eq!(data.holders, [[0, 1, 2, 3]]);
        assert_eq!(data.tensors.tiling, [0, 0]);
        assert_eq!(data.places[&1], [7, 9, 7, 9, 7, 9, 7, 9]);
    }

    #[test]
    fn what_is_not_a_grid_is_kept_as_boxes() {
        let flat: [(&[u64], &[u64], u32); 3] = [(&[0, 0], &[1, 6], 0), (&[1, 0], &[1, 2], 0), (&[1, 2], &[1, 4], 1)];
        let gap: [(&[u64], &[u64], u32); 2] = [(&[0, 0], &[2, 2], 0), (&[0, 4], &[2, 2], 1)];
        let overlap: [(&[u64], &[u64], u32); 2] = [(&[0, 0], &[2, 4], 0), (&[0, 2], &[2, 4], 1)];
        let empty: [(&[u64], &[u64], u32); 2] = [(&[0, 0], &[2, 6], 0), (&[2, 0], &[0, 6], 1)];
        for boxes in [&flat[..], &gap[..], &overlap[..], &empty[..], &[]] {
            let mut builder = ReportBuilder::new(Checkpoint::default());
            add(&mut builder, "a", &[2, 6], boxes);
            let data = builder.finish();
            let Cuts::Boxes(numbers) = &data.tilings[0].cuts else {
                panic!("{boxes:?} became {:?}", data.tilings[0].cuts);
            };
            assert_eq!(numbers.len(), boxes.len() * 4);
        }
    }

    #[test]
    fn scalars_and_uncut_tensors_are_whole() {
        let mut builder = ReportBuilder::new(Checkpoint::default());
        add(&mut builder, "scalar", &[], &[(&[], &[], 0)]);
        add(&mut builder, "whole", &[3], &[(&[0], &[3], 0)]);
        add(&mut builder, "empty", &[0], &[(&[0], &[0], 0)]);
        let data = builder.finish();
        assert!(data.tilings.iter().all(|tiling| tiling.cuts == Cuts::Whole));
        let json = serde_json::to_string(&data).unwrap();
        assert_eq!(serde_json::from_str::<ReportData>(&json).unwrap(), data);
    }

    #[test]
    fn a_chunk_with_the_wrong_number_of_dimensions_is_no_grid() {
        let mut builder = ReportBuilder::new(Checkpoint::default());
        add(&mut builder, "odd", &[4, 4], &[(&[0], &[4], 0), (&[2], &[2], 0)]);
        assert!(matches!(builder.finish().tilings[0].cuts, Cuts::Boxes(_)));
    }

    #[test]
    fn ten_thousand_tensors_in_eighty_chunks_stay_small() {
        let mut builder = ReportBuilder::new(Checkpoint::default());
        let offsets: Vec<[u64; 2]> = (0..80).map(|rank| [rank * 64, 0]).collect();
        let chunks: Vec<_> = offsets
            .iter()
            .zip(0..)
            .map(|(offsets, file)| ChunkInput { offsets, sizes: &[64, 4096], file, location: Some((1 << 33, 1 << 20)) })
            .collect();
        for number in 0..10_000 {
            let key = format!("optim.state.model.layers.{number}.mlp.up_proj.weight.exp_avg");
            builder.tensor(TensorInput { key: &key, dtype: "float32", shape: &[5120, 4096], bytes: 83_886_080, chunks: &chunks });
        }
        let json = serde_json::to_string(&builder.finish()).unwrap();
        assert!(json.len() < 1_000_000, "{} bytes", json.len());
    }
}

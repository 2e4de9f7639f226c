// The data, made easy to use: tensors as objects, the chunks of a tiling, the tree of modules.

const data = JSON.parse($('data').textContent);

const tensors = data.tensors.key.map((key, i) => {
  const tiling = data.tilings[data.tensors.tiling[i]];
  return {
    i, key, lower: key.toLowerCase(),
    dtype: data.tensors.dtype[i], dtypeName: data.dtypes[data.tensors.dtype[i]],
    bytes: data.tensors.bytes[i], tiling, shape: tiling.s,
    holders: data.tensors.holders[i], chunks: data.holders[data.tensors.holders[i]].length,
  };
});
const byKey = new Map(tensors.map((tensor) => [tensor.key, tensor]));
const total = {
  bytes: tensors.reduce((sum, tensor) => sum + tensor.bytes, 0),
  chunks: tensors.reduce((sum, tensor) => sum + tensor.chunks, 0),
  elements: tensors.reduce((sum, tensor) => sum + volume(tensor.shape), 0),
  stored: data.files.reduce((sum, file) => sum + file.bytes, 0),
};
const ranks = [...new Set(data.files.map((file) => file.rank).filter((rank) => rank !== undefined))].sort((a, b) => a - b);
const rankPlace = new Map(ranks.map((rank, place) => [rank, place]));
const ranked = ranks.length > 0 && data.files.every((file) => file.rank !== undefined);

// The chunks of a tiling: offsets and sizes, in the order of the holders. Tilings are shared, so each is unfolded once.
const unfolded = new Map();
function boxesOf(tiling) {
  if (unfolded.has(tiling)) return unfolded.get(tiling);
  const boxes = [];
  const ndim = tiling.s.length;
  if (tiling.g) {
    const at = new Array(ndim).fill(0);
    const cells = tiling.g.reduce((product, cuts) => product * (cuts.length - 1), 1);
    for (let cell = 0; cell < cells; cell += 1) {
      boxes.push({ offsets: at.map((i, d) => tiling.g[d][i]), sizes: at.map((i, d) => tiling.g[d][i + 1] - tiling.g[d][i]) });
      for (let d = ndim - 1; d >= 0; d -= 1) {
        at[d] += 1;
        if (at[d] < tiling.g[d].length - 1) break;
        at[d] = 0;
      }
    }
  } else if (tiling.b) {
    for (let i = 0; i + 2 * ndim <= tiling.b.length && ndim > 0; i += 2 * ndim) {
      boxes.push({ offsets: tiling.b.slice(i, i + ndim), sizes: tiling.b.slice(i + ndim, i + 2 * ndim) });
    }
  } else {
    boxes.push({ offsets: tiling.s.map(() => 0), sizes: tiling.s.slice() });
  }
  unfolded.set(tiling, boxes);
  return boxes;
}
// How a tensor is cut, in a few words.
function cutText(tensor) {
  const { tiling } = tensor;
  if (tiling.g) {
    const parts = tiling.g.map((cuts) => cuts.length - 1);
    const cut = parts.map((n, d) => [n, d]).filter(([n]) => n > 1);
    if (cut.length === 1) return `${cut[0][0]} parts along dim ${cut[0][1]}`;
    return `${parts.join(' × ')} grid`;
  }
  if (tiling.b) return tensor.chunks ? plural(tensor.chunks, 'irregular piece') : 'nothing stored';
  return 'whole, in one chunk';
}
const regionText = ({ offsets, sizes }) =>
  (offsets.length ? `[${offsets.map((o, d) => `${o}:${o + sizes[d]}`).join(', ')}]` : '[]');

// The tree of modules. A module that holds one module only is shown joined with it.
const newNode = (name, path, parent) => ({ name: name || '(no name)', path, parent, bytes: 0, tensors: 0, children: new Map(), leaf: null });
const root = newNode('All', '', null);
for (const tensor of tensors) {
  let node = root;
  let end = -1;
  let depth = 0;
  do {
    // A key of thousands of dots is an accident or an attack; what is past the 64th is one name.
    const next = (depth += 1) < 64 ? tensor.key.indexOf('.', end + 1) : -1;
    const stop = next < 0 ? tensor.key.length : next;
    const name = tensor.key.slice(end + 1, stop);
    end = stop;
    // The tensor itself is kept apart from a module of the same name.
    const id = end === tensor.key.length ? `${name} ` : name;
    if (!node.children.has(id)) node.children.set(id, newNode(name, tensor.key.slice(0, end), node));
    node = node.children.get(id);
  } while (end < tensor.key.length);
  node.leaf = tensor;
}
(function measure(node) {
  let children = [...node.children.values()];
  for (const child of children) measure(child);
  if (node.leaf) { node.bytes += node.leaf.bytes; node.tensors += 1; }
  for (const child of children) { node.bytes += child.bytes; node.tensors += child.tensors; }
  if (children.length === 1 && !node.leaf && node.parent) {
    const [only] = children;
    node.name = `${node.name}.${only.name}`;
    node.path = only.path;
    node.leaf = only.leaf;
    children = only.kids;
  }
  node.kids = children.sort((a, b) => b.bytes - a.bytes || natural(a.name, b.name));
  for (const child of node.kids) child.parent = node;
  node.children = null;
})(root);

// The top-level parts, each with a colour of its own; past seven the smallest share the last.
const parts = root.kids.length === 1 && !root.kids[0].leaf ? root.kids[0].kids : root.kids;
const partTotal = Math.min(parts.length, HUES);
parts.forEach((part, i) => { (function paint(node) { node.part = Math.min(i, HUES - 1); if (node.leaf) node.leaf.part = node.part; node.kids.forEach(paint); })(part); });

// What the comparison says about a tensor.
const change = new Map();
if (data.diff) {
  for (const changed of data.diff.changed) change.set(changed.tensor, changed);
  for (const tensor of data.diff.only_a) change.set(tensor, 'only_a');
}

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
// How a tensor is cut, in the words of placements: `Shard(0) over 4: 2+2+2+0 rows`. Ranks that got nothing count, too.
const UNIT = ['rows', 'columns'];
function shardText(d, sizes) {
  const unit = UNIT[d] ?? 'elements';
  // Empty chunks are all alike and stored as one: there may have been more ranks that got nothing.
  const alike = sizes.length > 1 && sizes.at(-1) === 0 && sizes.at(-2) !== 0 && !(ranked && ranks.length <= sizes.length);
  const text = `Shard(${d}) over ${count(sizes.length)}${alike ? ' or more' : ''}`;
  if (sizes.every((size) => size === sizes[0])) return `${text}: ${count(sizes[0])} ${unit} each`;
  return sizes.length <= 8 ? `${text}: ${sizes.join('+')} ${unit}` : `${text}: ${count(Math.min(...sizes))} to ${count(Math.max(...sizes))} ${unit}`;
}
// The sizes of pieces along one dimension, if they are nothing but slices of it, in order; empty ones go last.
function slices(tiling) {
  const boxes = boxesOf(tiling);
  const full = boxes.filter((box) => volume(box.sizes) > 0);
  const cut = tiling.s.map((size, d) => d).filter((d) => full.some((box) => box.sizes[d] !== tiling.s[d]));
  if (!full.length || cut.length > 1) return null;
  const d = cut[0] ?? 0;
  full.sort((a, b) => a.offsets[d] - b.offsets[d]);
  let at = 0;
  for (const box of full) { if (box.offsets[d] !== at) return null; at += box.sizes[d]; }
  return at === tiling.s[d] ? [d, [...full.map((box) => box.sizes[d]), ...boxes.slice(full.length).map(() => 0)]] : null;
}
function cutText(tensor) {
  const { tiling } = tensor;
  if (!tensor.chunks) return 'nothing stored';
  if (tiling.g) {
    const cut = tiling.g.map((cuts, d) => [cuts.length - 1, d]).filter(([n]) => n > 1);
    if (cut.length > 1) return cut.map(([n, d]) => `Shard(${d}) over ${count(n)}`).join(' × ');
  }
  if (tiling.g || tiling.b) {
    const found = tiling.s.length ? slices(tiling) : null;
    return found ? shardText(...found) : plural(tensor.chunks, 'irregular piece');
  }
  return 'whole, in one chunk';
}
const regionText = ({ offsets, sizes }) =>
  (offsets.length ? `[${offsets.map((o, d) => `${o}:${o + sizes[d]}`).join(', ')}]` : '[]');

// Very many modules that are alike but for a number in their names fold into one: "1,993 alike". Whatever else is too much
// to draw folds by size.
const MANY = 160; const KEPT = 7; const MOST_DRAWN = 400;
const looks = new Map();
const generic = (name) => name.replace(/\d+/g, '#');
function lookOf(node) {
  const text = node.kids.length
    ? node.kids.map((kid) => `${generic(kid.name)}:${kid.look}`).sort().join('|') : `${node.leaf?.dtype}[${node.leaf?.shape}]`;
  if (!looks.has(text)) looks.set(text, looks.size);
  return looks.get(text);
}
function folded(parent, kids, word) {
  const node = newNode(`${count(kids.length)} ${word}`, parent.path, parent);
  node.fold = true;
  node.kids = kids.sort((a, b) => b.bytes - a.bytes || natural(a.name, b.name));
  for (const kid of kids) { node.bytes += kid.bytes; node.tensors += kid.tensors; kid.parent = node; }
  node.look = -1;
  return node;
}
function fold(parent, kids) {
  if (kids.length <= MANY) return kids;
  const groups = new Map();
  for (const kid of kids) {
    const key = `${generic(kid.name)}:${kid.look}`;
    if (groups.has(key)) groups.get(key).push(kid); else groups.set(key, [kid]);
  }
  let shown = [];
  for (const group of groups.values()) {
    if (group.length <= 4 * KEPT) { shown.push(...group); continue; }
    group.sort((a, b) => natural(a.name, b.name));
    shown.push(...group.slice(0, KEPT), folded(parent, group.slice(KEPT), 'alike'));
  }
  if (shown.length > MOST_DRAWN) {
    shown.sort((a, b) => b.bytes - a.bytes);
    shown = [...shown.slice(0, MANY), folded(parent, shown.slice(MANY), 'smaller')];
  }
  return shown;
}
const within = (node, each) => { if (node.leaf) each(node.leaf); for (const kid of node.kids) within(kid, each); };

// The tree of modules. A module that holds one module only is shown joined with it.
const newNode = (name, path, parent) => ({ name: named(name), path, parent, bytes: 0, tensors: 0, children: new Map(), leaf: null });
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
  node.kids = fold(node, children).sort((a, b) => b.bytes - a.bytes || natural(a.name, b.name));
  node.look = lookOf(node);
  for (const child of node.kids) child.parent = node;
  node.children = null;
})(root);

// The top-level parts, each with a colour of its own; past seven the smallest share the last.
const parts = root.kids.length === 1 && !root.kids[0].leaf ? root.kids[0].kids : root.kids;
const partTotal = Math.min(parts.length, HUES);
parts.forEach((part, i) => { (function paint(node) { node.part = Math.min(i, HUES - 1); if (node.leaf) node.leaf.part = node.part; node.kids.forEach(paint); })(part); });

// What a tensor is for, told by its name. Optimizer state has the role of its parameter.
const ROLES = [
  ['attention', 'Attention', 'var(--c0)'], ['mlp', 'MLP', 'var(--c1)'], ['embedding', 'Embedding and head', 'var(--c2)'],
  ['norm', 'Norm', 'var(--c3)'], ['experts', 'Experts', 'var(--c6)'], ['other', 'Other', 'var(--same)'],
];
const ROLE_WORDS = [
  ['norm', /norm|(^|[._])ln(_?\w{1,5})?([._]|$)/],
  ['experts', /(^|[._])(experts?|moe|router|gate\.weight|block_sparse_moe)([._]|$)/],
  ['attention', /(attn|attention)\w*\.output\./],
  ['other', /(^|\.)(mixer|mamba)\.(in|out|x|dt)_proj\./],
  ['embedding', /embed|(^|[._])(wte|wpe|lm_head|head|output|output_layer|tok_embeddings|shared|unembed)\.(weight|bias)/],
  ['attention', /attn|attention|(^|[._])(q|k|v|o|qkv|kv|query|key|value|w[qkvo]|c_attn|in_proj|out_proj)(_proj|_a|_b|_lora)?([._]|$)/],
  ['mlp', /mlp|ffn|feed_?forward|(^|[._])(fc\d?|c_fc|w[123]|(up|down|gate)(_proj)?|dense\w*|linear\d?|intermediate)([._]|$)/],
];
for (const tensor of tensors) tensor.role = ROLE_WORDS.find(([, words]) => words.test(tensor.lower))?.[0] ?? 'other';
const rolesFound = ROLES.filter(([id]) => tensors.some((tensor) => tensor.role === id));
const roleHue = (id) => ROLES.find(([role]) => role === id)[2];

// Element types, each with a colour that no other has: the eight hues, or as many steps around the circle as there are types.
const typeHue = (i) => (data.dtypes.length <= HUES ? `var(--c${i})`
  : `oklch(${[0.66, 0.8, 0.52][i % 3]} ${i % 2 ? 0.13 : 0.17} ${((360 * i) / data.dtypes.length).toFixed(1)})`);

// The numbers, where they were looked at; live, they come later.
let numbers = data.numbers ?? null;
const onNumbers = [];
const nameA = data.diff?.name_a ?? 'A'; const nameB = data.diff?.name_b ?? 'B';
// Of two checkpoints the numbers of one are shown at a time: those of the second, the newer, until somebody asks for the first.
// Where only one of them was read there is nothing to choose.
const SIDES = {
  a: () => ({ name: nameA, stats: numbers?.stats, flags: numbers?.flags, updates: numbers?.updates, optimizer: data.optimizer }),
  b: () => ({ name: nameB, stats: numbers?.other, flags: numbers?.other_flags, updates: numbers?.other_updates, optimizer: data.other_optimizer }),
};
let side = data.diff ? 'b' : 'a';
let shown = SIDES[side]();
const onSide = [];
const isRead = (which) => Object.keys(SIDES[which]().stats ?? {}).length > 0;
const hasBothSides = () => Boolean(data.diff) && isRead('a') && isRead('b');
function takeSide(which) {
  const rest = which === 'a' ? 'b' : 'a';
  side = !data.diff ? 'a' : isRead(which) || !isRead(rest) ? which : rest;
  shown = SIDES[side]();
}
takeSide(side);
const statsOf = (tensor) => shown.stats?.[tensor.i];
const flagOf = (tensor) => shown.flags?.[tensor.i];
const updateOf = (tensor) => shown.updates?.[tensor.i];
const badCount = (stats) => stats.nans + stats.infs;
// The numbers of one of the two, whichever is shown.
const firstStatsOf = (tensor) => numbers?.stats?.[tensor.i];
const firstFlagOf = (tensor) => numbers?.flags?.[tensor.i];
const otherStatsOf = (tensor) => numbers?.other?.[tensor.i];
const otherFlagOf = (tensor) => numbers?.other_flags?.[tensor.i];
// Whose numbers a card shows; where there are those of both, a switch.
function fillSide(node) {
  if (!data.diff || !numbers) return node.replaceChildren();
  if (!hasBothSides()) return node.replaceChildren(el('span', { class: 'soft' }, `numbers of ${shown.name}`));
  segmented(node, [['a', nameA], ['b', nameB]], side, (which) => { takeSide(which); for (const redraw of onSide) redraw(); });
}
function sideSwitch() {
  const node = el('div', { class: 'segmented side', role: 'group', 'aria-label': 'Whose numbers' });
  fillSide(node);
  return node;
}
function fillSides() { for (const id of ['side', 'table-side']) fillSide($(id)); }
onSide.push(fillSides);
onNumbers.push(fillSides);
const breaks = (tensor, rule) => Boolean(flagOf(tensor)?.rules.includes(rule));
// The rules that are about how large numbers are.
const SIZE_RULES = ['large-weight', 'outlier-weight', 'large-second-moment', 'zero-weight', 'dead-parameter'];
const FINITE_RULES = ['nan', 'inf'];
// The rules whose breach makes a checkpoint bad; that of any other is merely to know.
const GRAVE_RULES = ['nan', 'inf', 'large-weight', 'outlier-weight', 'negative-second-moment', 'large-second-moment'];
// How grave it is which of some rules are broken: 'bad', 'warn' or nothing. Nothing but a rule makes an alarm.
function breach(flags, rules) {
  const broken = flags.flatMap((flag) => flag?.rules ?? []).filter((rule) => rules.includes(rule));
  return broken.some((rule) => GRAVE_RULES.includes(rule)) ? 'bad' : broken.length ? 'warn' : '';
}
const stateRoot = data.optimizer ? `${data.optimizer.root}state.` : null;
const isState = (tensor) => stateRoot !== null && tensor.key.startsWith(stateRoot);
// The optimizer's state of each weight: a parameter is named as its weight is, or without the first part of that name.
const stateOf = new Map();
const strayStates = [];
if (stateRoot !== null) {
  const weights = new Map();
  for (const tensor of tensors.filter((tensor) => !isState(tensor))) {
    for (const name of [tensor.key.slice(tensor.key.indexOf('.') + 1), tensor.key]) weights.set(name, tensor);
  }
  for (const tensor of tensors.filter(isState)) {
    const weight = weights.get(tensor.key.slice(stateRoot.length, tensor.key.lastIndexOf('.')));
    if (!weight) strayStates.push(tensor);
    else if (stateOf.has(weight.i)) stateOf.get(weight.i).push(tensor);
    else stateOf.set(weight.i, [tensor]);
  }
}

// What the comparison says about a tensor.
const change = new Map();
// Live, it comes later: nothing is the same before it was compared.
const isCompared = () => Boolean(data.diff && !data.comparing && !data.not_compared);
function noteChanges() {
  if (!isCompared()) return;
  for (const changed of data.diff.changed) change.set(changed.tensor, changed);
  for (const tensor of data.diff.only_a) change.set(tensor, 'only_a');
}
noteChanges();

// The comparison with a second checkpoint: how much is the same, and what is not.

// What is bad: no longer finite, or breaks a rule in the other checkpoint that makes it so.
const isBad = (what, tensor) => what.newly_bad > 0 || Boolean(tensor && otherFlagOf(tensor)?.bad);
const kindOf = (what, tensor) => (what === undefined ? 'same' : what === 'only_a' ? 'only-a' : isBad(what, tensor) ? 'bad' : what.newly_zero ? 'zero'
  : what.shape ? 'shape' : what.dtype ? 'dtype' : 'value');
const valuesCompared = data.diff?.values_compared ?? false;
// What is the same is so as far as it was compared.
const unchangedText = () => (valuesCompared ? 'unchanged' : 'of the same type and shape, values not compared');
const KIND = {
  same: valuesCompared ? 'same' : 'alike', value: 'values', 'only-b': 'new', 'only-a': 'gone', dtype: 'type', shape: 'shape', zero: 'now zero', bad: 'bad',
};
const BROKEN = { nan: 'has NaN', inf: 'has Inf', 'large-weight': 'too large', 'outlier-weight': 'too large', 'large-second-moment': 'too large', 'negative-second-moment': 'negative' };
// What rules say of a tensor that only the other checkpoint has.
const newFlagOf = (key) => numbers?.new_flags?.[key];
const brokenWord = (flag) => flag.rules.map((rule) => BROKEN[rule]).find(Boolean) ?? KIND.bad;
// What is bad, in a word; whether what is new is NaN or Inf is told by the numbers, where they were read.
function badWord(what, tensor) {
  if (!what.newly_bad) return brokenWord(tensor.flag ?? otherFlagOf(tensor));
  const [ours, theirs] = [firstStatsOf(tensor), otherStatsOf(tensor)];
  const more = (of) => theirs?.[of] > (ours?.[of] ?? 0);
  if (more('nans') || more('infs')) return more('nans') ? 'now NaN' : 'now Inf';
  return theirs?.nans ? 'now NaN' : theirs?.infs ? 'now Inf' : 'NaN or Inf';
}
// The order of what matters: what is bad, then what is zero now; then the rest by kind, the optimizer's state, whose moments
// always move, after all weights; then by how far.
// What is no longer finite is nowhere: farther than anything that is.
const moved = (what) => (what?.newly_bad ? Infinity : what?.moved ?? what?.max_rel ?? 0);
const isFinitely = (what, field) => !(what.newly_bad && (['moved', 'cosine'].includes(field) || !what[field]));
const changeText = (what, field) => (isFinitely(what, field) ? number(what[field]) : field === 'moved' ? 'NaN' : '–');
function matters(kind, what, tensor) {
  const kinds = Object.keys(KIND);
  if (kind === 'same') return 0;
  const weight = isState(tensor) ? 0 : 1;
  // What is not finite comes before what is too large.
  const flag = kind === 'bad' && (tensor.flag ?? otherFlagOf(tensor));
  const lost = kind === 'bad' && (what.newly_bad || breach([flag], FINITE_RULES));
  const level = kinds.indexOf(kind) + kinds.length * (['bad', 'zero'].includes(kind) ? 2 : weight) + (lost ? 1 : 0);
  return level * 1e6 + weight * 5e5 + Math.min(Math.log10(moved(what) + 1e-30) + 30, 1e5);
}
function rankOfChange(tensor) {
  const what = change.get(tensor.i);
  return matters(kindOf(what, tensor), what, tensor);
}
const badge = (kind, what, tensor) => el('span', { class: `badge is-${kind}` }, kind === 'bad' ? badWord(what, tensor) : KIND[kind]);
function changeCell(tensor, cell) { const what = change.get(tensor.i); cell.append(badge(kindOf(what, tensor), what, tensor)); }

function diffSection() {
  const { diff } = data;
  if (!diff) return;
  const shared = tensors.length - diff.only_a.length;
  const same = shared - diff.changed.length;
  const items = [
    ...diff.changed.map((what) => ({ key: tensors[what.tensor].key, tensor: tensors[what.tensor], what, kind: kindOf(what, tensors[what.tensor]) })),
    ...diff.only_a.map((i) => ({ key: tensors[i].key, tensor: tensors[i], kind: 'only-a', what: {} })),
    ...diff.only_b.map((other) => {
      const flag = newFlagOf(other.key);
      return { key: other.key, other: { ...other, flag }, kind: flag?.bad ? 'bad' : 'only-b', what: {} };
    }),
  ];
  const segments = [
    { text: unchangedText(), size: same, hue: 'var(--same)' }, { text: 'changed', size: diff.changed.length, hue: 'var(--changed)' },
    { text: `only in ${nameA}`, size: diff.only_a.length, hue: 'var(--only-a)' }, { text: `only in ${nameB}`, size: diff.only_b.length, hue: 'var(--only-b)' },
  ];
  const compared = !diff.values_compared ? 'types and shapes compared, not values'
    : diff.tolerance ? `values compared, up to ${number(diff.tolerance)} counts as equal` : 'values compared bit by bit';
  const table = el('div', { class: 'rows short diff-rows', id: 'diff-table' });
  const choose = el('div', { class: 'segmented', role: 'group', 'aria-label': 'Differences to list' });
  // The verdict at the head is the graver one; here each has its own checks.
  const side = (word, name, location, judged) => el('div', {}, el('dt', {}, word),
    el('dd', {}, name, el('small', { class: 'mono soft', title: location }, location), checkList(judged, `What was checked of ${name}`)));
  $('diff').hidden = false;
  $('diff').replaceChildren(
    el('div', { class: 'card-head' }, el('h2', { id: 'diff-title' }, 'What changed'), choose),
    el('dl', { class: 'versus' }, side('from', nameA, data.checkpoint.location, health), side('to', nameB, diff.location, otherHealth)));
  if (data.comparing) return $('diff').append(el('p', { class: 'soft loading', role: 'status' }, 'Being compared…'));
  if (data.not_compared) return $('diff').append(el('p', { class: 'alarm' }, `Not compared: ${data.not_compared}`));
  $('diff').append(
    stack(segments, { class: 'stack tall' }),
    el('div', { class: 'legend' }, ...segments.map(({ text, size, hue }) => el('span', { css: { '--hue': hue } }, `${count(size)} ${text}`)),
      el('span', { class: 'plain soft' }, compared)),
    table);

  // Differences span many orders of magnitude: the bars are logarithmic, from the least to the greatest found.
  const sizes = diff.changed.map(moved).filter((x) => x > 0 && Number.isFinite(x)).map(Math.log10);
  const low = -greatest(sizes.map((x) => -x), -Infinity) - 0.5; const high = greatest(sizes, low + 1);
  const numeric = (field) => (item, cell) => { cell.textContent = field in item.what || !isFinitely(item.what, field) ? changeText(item.what, field) : ''; };
  const state = { only: 'all', by: 'kind', descending: true };
  const rows = new Rows(table, {
    nothing: () => (items.length ? 'Nothing of this kind.' : valuesCompared ? 'No tensor differs.' : 'No type or shape differs; values were not compared.'),
    label: 'Differences', // A click goes to the tensor; arrow keys stay in the list.
    choose: (item, byPointer) => { if (item.tensor) show(item.tensor, byPointer); }, sort(id) {
      state.descending = state.by === id ? !state.descending : id !== 'key';
      state.by = id;
      update();
    },
    columns: [
      { id: 'key', title: 'Name', sortable: true, className: 'key mono', cell: (item, cell) => keyCell(item.key, [], cell) },
      { id: 'kind', title: 'What', sortable: true, className: 'change', cell: (item, cell) => cell.append(badge(item.kind, item.what, item.tensor ?? item.other)) },
      { id: 'detail', title: 'What changed', className: 'arrow', cell(item, cell) {
        const { tensor, other, what } = item;
        const both = [what.dtype && `${tensor.dtypeName} → ${what.dtype}`, what.shape && `${shapeText(tensor.shape)} → ${shapeText(what.shape)}`];
        if (other) cell.textContent = `${other.flag ? `breaks ${other.flag.rules.join(', ')}: ` : ''}– → ${other.dtype} ${shapeText(other.shape)}`;
        else if (item.kind === 'only-a') cell.textContent = `${tensor.dtypeName} ${shapeText(tensor.shape)} → –`;
        else cell.textContent = both.filter(Boolean).join(', ') || (what.newly_bad ? `${count(what.newly_bad)} new NaN or Inf` : item.kind === 'bad' ? `breaks ${otherFlagOf(tensor).rules.join(', ')}` : what.newly_zero ? 'all of it is zero now' : what.first ? `first at [${what.first.join(', ')}]` : '');
      } },
      { id: 'moved', title: '‖Δw‖ / ‖w‖', sortable: true, className: 'num size', cell(item, cell) {
        if (item.what.newly_bad) return cell.append(el('span', { class: 'alarm' }, 'NaN'));
        const x = item.what.moved ?? item.what.max_rel;
        if (x === undefined || x === null) return;
        const part = x > 0 ? (Math.log10(x) - low) / (high - low) : 0;
        cell.append(el('i', { class: 'meter', 'aria-hidden': 'true', css: { '--part': String(part), '--hue': 'var(--changed)' } }), number(x));
      } },
      { id: 'cosine', title: 'Cosine', sortable: true, className: 'num', cell: numeric('cosine') },
      { id: 'max_abs', title: 'Max |Δ|', sortable: true, className: 'num', cell: numeric('max_abs') },
      { id: 'max_rel', title: 'Max rel', sortable: true, className: 'num', cell: numeric('max_rel') },
    ],
  });
  function update() {
    const shown = items.filter((item) => state.only === 'all' || item.kind === state.only || (state.only === 'only-b' && item.other) || (state.only === 'changed' && item.tensor && item.kind !== 'only-a'));
    const sign = state.descending ? -1 : 1;
    shown.sort((a, b) => {
      const by = state.by === 'key' ? 0 : state.by === 'kind' ? matters(a.kind, a.what, a.tensor ?? a.other) - matters(b.kind, b.what, b.tensor ?? b.other) : state.by === 'moved' ? Math.min(moved(a.what), 1e300) - Math.min(moved(b.what), 1e300) : (a.what[state.by] ?? -1) - (b.what[state.by] ?? -1);
      return sign * (by || (state.by === 'key' ? natural(a.key, b.key) : 0)) || natural(a.key, b.key);
    });
    rows.sorted(state.by, state.descending);
    table.scrollTop = 0;
    table.style.height = `${Math.min(8, Math.max(shown.length, 2) + 1) * ROW + 3}px`;
    rows.set(shown);
  }
  segmented(choose, [['all', 'All'], ['changed', 'Changed'], ['only-a', `Only in ${nameA}`], ['only-b', `Only in ${nameB}`]], 'all', (only) => { state.only = only; update(); });
  update();

  if (diff.plain?.length) {
    $('diff').append(el('h3', { class: 'sub' }, 'Plain values'), plainTable([['Key', 'mono'], [nameA, 'mono value'], [nameB, 'mono value']],
      diff.plain.slice(0, 200).map((row) => [row.key, row.a ?? '–', row.b ?? '–'])));
  }
}
onNumbers.push(diffSection);

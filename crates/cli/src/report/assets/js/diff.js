// The comparison with a second checkpoint: how much is the same, and what is not.

const kindOf = (what) => (what === undefined ? 'same' : what === 'only_a' ? 'only-a' : what.shape ? 'shape' : what.dtype ? 'dtype' : 'value');
const KIND = { same: 'same', value: 'values', dtype: 'type', shape: 'shape', 'only-a': 'only in A', 'only-b': 'only in B' };
// The order of "Change" in the tables: by kind, then by how far apart the values are.
function rankOfChange(tensor) {
  const what = change.get(tensor.i);
  const kind = Object.keys(KIND).indexOf(kindOf(what));
  return kind * 1e6 + Math.min(Math.log10((what?.max_rel ?? 0) + 1e-30) + 30, 1e5);
}
const badge = (kind) => el('span', { class: `badge is-${kind}` }, KIND[kind]);
function changeCell(tensor, cell) { cell.append(badge(kindOf(change.get(tensor.i)))); }

function diffSection() {
  const { diff } = data;
  if (!diff) return;
  const shared = tensors.length - diff.only_a.length;
  const same = shared - diff.changed.length;
  const items = [
    ...diff.changed.map((what) => ({ key: tensors[what.tensor].key, tensor: tensors[what.tensor], what, kind: kindOf(what) })),
    ...diff.only_a.map((i) => ({ key: tensors[i].key, tensor: tensors[i], kind: 'only-a', what: {} })),
    ...diff.only_b.map((other) => ({ key: other.key, other, kind: 'only-b', what: {} })),
  ];
  const segments = [
    { text: 'unchanged', size: same, hue: 'var(--same)' }, { text: 'changed', size: diff.changed.length, hue: 'var(--changed)' },
    { text: 'only in A', size: diff.only_a.length, hue: 'var(--only-a)' }, { text: 'only in B', size: diff.only_b.length, hue: 'var(--only-b)' },
  ];
  const compared = !diff.values_compared ? 'types and shapes compared, not values'
    : diff.tolerance ? `values compared, up to ${number(diff.tolerance)} counts as equal` : 'values compared bit by bit';
  const table = el('div', { class: 'rows short diff-rows', id: 'diff-table' });
  const choose = el('div', { class: 'segmented', role: 'group', 'aria-label': 'Differences to list' });
  $('diff').hidden = false;
  $('diff').replaceChildren(
    el('div', { class: 'card-head' }, el('h2', { id: 'diff-title' }, 'What changed'), choose),
    el('dl', { class: 'versus' },
      el('div', {}, el('dt', {}, 'A'), el('dd', {}, data.checkpoint.name, el('small', { class: 'mono soft' }, data.checkpoint.location))),
      el('div', {}, el('dt', {}, 'B'), el('dd', {}, diff.name, el('small', { class: 'mono soft' }, diff.location)))),
    stack(segments, { class: 'stack tall' }),
    el('div', { class: 'legend' }, ...segments.map(({ text, size, hue }) => el('span', { css: { '--hue': hue } }, `${count(size)} ${text}`)),
      el('span', { class: 'plain soft' }, compared)),
    table);

  // Differences span many orders of magnitude: the bars are logarithmic, from the least to the greatest found.
  const sizes = diff.changed.map((what) => what.max_rel).filter((x) => x > 0).map(Math.log10);
  const low = -greatest(sizes.map((x) => -x), -Infinity) - 0.5; const high = greatest(sizes, low + 1);
  const numeric = (field) => (item, cell) => { cell.textContent = field in item.what ? number(item.what[field]) : ''; };
  const state = { only: 'all', by: 'max_rel', descending: true };
  const rows = new Rows(table, {
    label: 'Differences', // A click goes to the tensor; arrow keys stay in the list.
    choose: (item, byPointer) => { if (item.tensor) show(item.tensor, byPointer); }, sort(id) {
      state.descending = state.by === id ? !state.descending : id !== 'key' && id !== 'kind';
      state.by = id;
      update();
    },
    columns: [
      { id: 'key', title: 'Name', sortable: true, className: 'key mono', cell: (item, cell) => keyCell(item.key, [], cell) },
      { id: 'kind', title: 'What', sortable: true, className: 'change', cell: (item, cell) => cell.append(badge(item.kind)) },
      { id: 'detail', title: 'A → B', className: 'arrow', cell(item, cell) {
        const { tensor, other, what } = item;
        const both = [what.dtype && `${tensor.dtypeName} → ${what.dtype}`, what.shape && `${shapeText(tensor.shape)} → ${shapeText(what.shape)}`];
        if (other) cell.textContent = `– → ${other.dtype} ${shapeText(other.shape)}`;
        else if (item.kind === 'only-a') cell.textContent = `${tensor.dtypeName} ${shapeText(tensor.shape)} → –`;
        else cell.textContent = both.filter(Boolean).join(', ') || (what.first ? `first at [${what.first.join(', ')}]` : '');
      } },
      { id: 'max_abs', title: 'Max |Δ|', sortable: true, className: 'num', cell: numeric('max_abs') },
      { id: 'mean_abs', title: 'Mean |Δ|', sortable: true, className: 'num', cell: numeric('mean_abs') },
      { id: 'max_rel', title: 'Max rel', sortable: true, className: 'num size', cell(item, cell) {
        if (!('max_rel' in item.what)) return;
        const x = item.what.max_rel;
        const part = x > 0 ? (Math.log10(x) - low) / (high - low) : 0;
        cell.append(el('i', { class: 'meter', 'aria-hidden': 'true', css: { '--part': String(part), '--hue': 'var(--changed)' } }), number(x));
      } },
    ],
  });
  function update() {
    const shown = items.filter((item) => state.only === 'all' || item.kind === state.only || (state.only === 'changed' && item.tensor && item.kind !== 'only-a'));
    const sign = state.descending ? -1 : 1;
    shown.sort((a, b) => {
      const by = state.by === 'key' ? 0 : state.by === 'kind' ? a.kind.localeCompare(b.kind) : (a.what[state.by] ?? -1) - (b.what[state.by] ?? -1);
      return sign * (by || (state.by === 'key' ? natural(a.key, b.key) : 0)) || natural(a.key, b.key);
    });
    rows.sorted(state.by, state.descending);
    table.scrollTop = 0;
    table.style.height = `${Math.min(9, Math.max(shown.length, 2) + 1) * ROW + 3}px`;
    rows.set(shown);
  }
  segmented(choose, [['all', 'All'], ['changed', 'Changed'], ['only-a', 'Only A'], ['only-b', 'Only B']], 'all', (only) => { state.only = only; update(); });
  update();

  if (diff.plain?.length) {
    $('diff').append(el('h3', { class: 'sub' }, 'Plain values'), plainTable([['Key', 'mono'], ['A', 'mono value'], ['B', 'mono value']],
      diff.plain.slice(0, 200).map((row) => [row.key, row.a ?? '–', row.b ?? '–'])));
  }
}

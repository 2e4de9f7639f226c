// The table of tensors: search by words or globs, sort, narrow to a module, a file or a type.

// A glob: * is anything, ? is one character, [abc] one of these. Anything else means itself.
function globPattern(glob) {
  let pattern = '';
  for (let i = 0; i < glob.length; i += 1) {
    const c = glob[i];
    const close = c === '[' ? glob.indexOf(']', i + 2) : -1;
    if (c === '*') pattern += pattern.endsWith('.*') ? '' : '.*';
    else if (c === '?') pattern += '.';
    else if (close > 0) {
      const inside = glob.slice(i + 1, close);
      pattern += `[${inside[0] === '!' ? '^' : ''}${inside.replace(/^!/, '').replace(/[\\\]^[]/g, '\\$&')}]`;
      i = close;
    } else pattern += c.replace(/[\\^$.*+?()[\]{}|/]/g, '\\$&');
  }
  try { return new RegExp(`^${pattern}$`, 's'); } catch { return null; }
}
// Every word must be found; a word with * ? or [ ] must match the whole key.
function matcher(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const tests = words.map((word) => {
    const pattern = /[*?[]/.test(word) ? globPattern(word) : null;
    return pattern ? (key) => pattern.test(key) : (key) => key.includes(word);
  });
  return { words, test: (key) => tests.every((test) => test(key)) };
}

// A key with the words found in it marked; the head of a long key gives way before its tail.
function keyCell(key, words, cell) {
  const lower = key.toLowerCase();
  const marks = [];
  for (const word of words) {
    const at = lower.length === key.length && !/[*?[]/.test(word) ? lower.indexOf(word) : -1;
    if (at >= 0) marks.push([at, at + word.length]);
  }
  marks.sort((a, b) => a[0] - b[0]);
  const put = (node, from, to) => {
    let at = from;
    for (const [start, end] of marks) {
      const [s, e] = [Math.max(start, at), Math.min(end, to)];
      if (s >= e) continue;
      node.append(key.slice(at, s), el('mark', {}, key.slice(s, e)));
      at = e;
    }
    node.append(key.slice(at, to));
    return node;
  };
  const split = key.lastIndexOf('.', key.lastIndexOf('.') - 1) + 1;
  cell.title = key;
  if (!key) { cell.append(el('span', { class: 'path' }, '(no name)')); return; }
  cell.append(put(el('span', { class: 'path' }), 0, split), put(el('span', { class: 'last' }), split, key.length));
}

const list = {
  query: '', match: matcher(''), dtype: -1, scope: null, by: 'bytes', descending: true, orders: new Map(), items: [],

  order() {
    if (!this.orders.has(this.by)) {
      const compare = {
        key: (a, b) => natural(a.key, b.key), bytes: (a, b) => a.bytes - b.bytes, chunks: (a, b) => a.chunks - b.chunks,
        dtype: (a, b) => natural(a.dtypeName, b.dtypeName), shape: (a, b) => volume(a.shape) - volume(b.shape),
        change: (a, b) => rankOfChange(a) - rankOfChange(b),
      }[this.by];
      // Ties go by name in both directions, so each column keeps two orders.
      const byName = this.by === 'key' ? tensors : this.namesInOrder();
      this.orders.set(this.by, { up: [...byName].sort(compare), down: [...byName].sort((a, b) => compare(b, a)) });
    }
    return this.orders.get(this.by)[this.descending ? 'down' : 'up'];
  },
  namesInOrder() {
    this.names ??= [...tensors].sort((a, b) => natural(a.key, b.key));
    return this.names;
  },

  inScope() {
    const { scope } = this;
    if (!scope) return () => true;
    if (scope.kind === 'module') return (tensor) => tensor.key === scope.path || tensor.key.startsWith(`${scope.path}.`);
    const rows = data.holders.map((files) => files.some((file) => scope.files.has(file)));
    return (tensor) => rows[tensor.holders];
  },

  update() {
    const start = performance.now();
    const inScope = this.inScope();
    this.items = this.order().filter((tensor) => (this.dtype < 0 || tensor.dtype === this.dtype) && inScope(tensor) && this.match.test(tensor.lower));
    this.rows.box.scrollTop = 0;
    this.rows.sorted(this.by, this.descending);
    this.rows.set(this.items, this.items.indexOf(chosen));
    const sum = this.items.reduce((acc, tensor) => acc + tensor.bytes, 0);
    $('shown').textContent = this.items.length === tensors.length
      ? plural(tensors.length, 'tensor') : `${count(this.items.length)} of ${count(tensors.length)} · ${bytes(sum)}`;
    $('scope').replaceChildren(...(this.scope ? [el('button', {
      type: 'button', class: 'chip', title: 'Show all again', on: { click: () => this.within(null) },
    }, el('span', {}, this.scope.label), el('b', { 'aria-label': 'remove' }, '×'))] : []));
    // The page's own tests read this.
    $('table').dataset.tookMs = (performance.now() - start).toFixed(1);
  },

  within(scope) { this.scope = scope; this.update(); },
  sortBy(id) {
    this.descending = this.by === id ? !this.descending : ['bytes', 'chunks', 'shape', 'change'].includes(id);
    this.by = id;
    this.update();
  },
  // Brings a tensor's row into view, letting go of whatever hides it.
  reveal(tensor) {
    if (!this.items.includes(tensor)) {
      this.scope = null; this.dtype = -1; this.query = ''; this.match = matcher('');
      $('search').value = ''; $('dtype-filter').value = '-1';
      this.update();
    }
    this.rows.go(this.items.indexOf(tensor), false);
  },

  start() {
    const largest = tensors.reduce((most, tensor) => Math.max(most, tensor.bytes), 1);
    const text = (get) => (tensor, cell) => { cell.textContent = get(tensor); };
    this.rows = new Rows($('table'), {
      label: 'Tensors', choose: (tensor) => show(tensor), sort: (id) => this.sortBy(id),
      columns: [
        { id: 'key', title: 'Name', sortable: true, className: 'key mono', cell: (tensor, cell) => keyCell(tensor.key, this.match.words, cell) },
        ...(data.diff ? [{ id: 'change', title: 'Change', sortable: true, className: 'change', cell: changeCell }] : []),
        { id: 'dtype', title: 'Type', sortable: true, className: 'dtype', cell: text((tensor) => tensor.dtypeName) },
        { id: 'shape', title: 'Shape', sortable: true, className: 'shape', cell: text((tensor) => shapeText(tensor.shape)) },
        { id: 'chunks', title: 'Chunks', sortable: true, className: 'num', cell: text((tensor) => count(tensor.chunks)) },
        {
          id: 'bytes', title: 'Bytes', sortable: true, className: 'num size',
          cell(tensor, cell) {
            // By the square root, or all but the largest would have no bar.
            const css = { '--part': String(Math.sqrt(tensor.bytes / largest)), '--hue': `var(--c${tensor.part ?? 0})` };
            cell.append(el('i', { class: 'meter', 'aria-hidden': 'true', css }), bytes(tensor.bytes));
          },
        },
      ],
    });
    if (data.diff) $('table').classList.add('with-change');
    $('search').addEventListener('input', (event) => { this.query = event.target.value; this.match = matcher(this.query); this.update(); });
    $('search').addEventListener('keydown', (event) => {
      if (event.key === 'ArrowDown' || event.key === 'Enter') { event.preventDefault(); $('table').focus(); this.rows.go(Math.max(this.rows.chosen, 0), true); }
    });
    addEventListener('keydown', (event) => {
      const typing = /INPUT|SELECT|TEXTAREA/.test(document.activeElement?.tagName ?? '');
      if (event.key !== '/' || event.ctrlKey || event.metaKey || typing) return;
      event.preventDefault();
      $('search').focus();
      $('search').select();
    });
    $('dtype-filter').replaceChildren(el('option', { value: '-1' }, 'All types'), ...data.dtypes.map((name, i) => el('option', { value: i }, name)));
    $('dtype-filter').addEventListener('change', (event) => { this.dtype = Number(event.target.value); this.update(); });
    this.update();
  },
};

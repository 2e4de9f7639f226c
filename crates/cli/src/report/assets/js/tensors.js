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
// Numbers that a word of a query may ask for: `rms>1`, `nan>0`, `zero>50%`.
const MEASURES = {
  nan: (tensor) => statsOf(tensor)?.nans, inf: (tensor) => statsOf(tensor)?.infs, rms: (tensor) => statsOf(tensor)?.rms,
  zero(tensor) { const stats = statsOf(tensor); return stats && stats.zeros / (stats.count || 1); },
  max(tensor) { const stats = statsOf(tensor); return stats && Math.max(Math.abs(stats.min ?? 0), Math.abs(stats.max ?? 0)); },
  std: (tensor) => statsOf(tensor)?.std, mean: (tensor) => statsOf(tensor)?.mean,
  update: (tensor) => updateOf(tensor), bytes: (tensor) => tensor.bytes,
  // What is no longer finite has moved farther than any number says.
  moved(tensor) { const what = change.get(tensor.i); return what === undefined ? (isCompared() && valuesCompared ? 0 : undefined) : what.newly_bad ? Infinity : what.moved; },
};
MEASURES.zeros = MEASURES.zero; MEASURES.size = MEASURES.bytes;
const COMPARE = { '>': (x, y) => x > y, '<': (x, y) => x < y, '>=': (x, y) => x >= y, '<=': (x, y) => x <= y, '=': (x, y) => x === y, '!=': (x, y) => x !== y };
const TIMES = { '%': 0.01, k: 1e3, m: 1e6, g: 1e9, t: 1e12 };
// Why a measure is not known of any tensor, if so.
function whyUnknown(name) {
  if (['bytes', 'size'].includes(name)) return null;
  if (name === 'moved') {
    return !data.diff ? 'there is no second checkpoint to have moved to' : data.comparing ? 'the two checkpoints are still being compared'
      : data.not_compared ? 'the two checkpoints could not be compared' : valuesCompared ? null : 'values were not compared';
  }
  if (!numbers) return health.checks.numbers.state === 'running' ? 'numbers are still being read' : 'numbers were not read';
  return name === 'update' && !Object.keys(shown.updates ?? {}).length ? 'no update could be told from an optimizer’s state' : null;
}
// `rms >= 1` is one word, as `rms>=1` is.
const SPACED = new RegExp(`(?<![^\\s])(${Object.keys(MEASURES).join('|')})\\s*([<>]=?|!?=)\\s*(-?[\\d.][^\\s%]*)(?:\\s*(%|[kmgt]b(?!\\S)))?`, 'g');
const ASKS = /^([a-z_]\w*)([<>]=?|!?=)(-?[\d.]+(?:e[-+]?\d+)?)(%|[kmgt]?)b?$/;
function measure(word) {
  const found = ASKS.exec(word);
  const of = found && Object.hasOwn(MEASURES, found[1]) ? MEASURES[found[1]] : null;
  if (!of) return null;
  const limit = Number(found[3]) * (TIMES[found[4]] ?? 1);
  return (tensor) => { const x = of(tensor); return typeof x === 'number' && COMPARE[found[2]](x, limit); };
}
// Why a query that finds nothing could not find anything.
function whyNothing(words) {
  for (const word of words) {
    const name = ASKS.exec(word)?.[1];
    if (name === undefined) continue;
    if (!Object.hasOwn(MEASURES, name)) return `Unknown measure “${name}”: there are ${Object.keys(MEASURES).join(', ')}.`;
    const why = whyUnknown(name);
    if (why) return `Nothing is found by “${word}”: ${why}.`;
  }
  return 'Nothing matches.';
}
// Every word must be found; a word with * ? or [ ] must match the whole key.
function matcher(query) {
  const words = query.toLowerCase().replace(/≥/g, '>=').replace(/≤/g, '<=').replace(SPACED, '$1$2$3$4').split(/\s+/).filter(Boolean);
  const tests = words.map((word) => {
    const asks = measure(word);
    if (asks) return asks;
    const pattern = /[*?[]/.test(word) ? globPattern(word) : null;
    return pattern ? (tensor) => pattern.test(tensor.lower) : (tensor) => tensor.lower.includes(word);
  });
  return { words, test: (tensor) => tests.every((test) => test(tensor)) };
}
// Choices of the filter by numbers.
const FILTERS = {
  nan: ['NaN', (tensor) => statsOf(tensor)?.nans > 0],
  inf: ['Inf', (tensor) => statsOf(tensor)?.infs > 0],
  bad: ['NaN or Inf', (tensor) => statsOf(tensor) && badCount(statsOf(tensor)) > 0],
  zero: ['All zero', (tensor) => statsOf(tensor)?.count > 0 && statsOf(tensor).zeros === statsOf(tensor).count],
  flagged: ['Breaks a rule', (tensor) => flagOf(tensor)],
  weights: ['Weights only', (tensor) => !isState(tensor)],
};

// A key with the words found in it marked. Where there is no room for all of it, what lies between its numbers gives way: which
// layer, which expert and the last parts stay to be seen.
const MOST_NUMBERS = 3;
function keyPieces(key) {
  const end = key.lastIndexOf('.', key.lastIndexOf('.') - 1) + 1;
  const pieces = [];
  let from = 0;
  const put = (className, to) => { if (to > from) pieces.push([className, from, to]); from = Math.max(from, to); };
  for (const found of key.slice(0, end).matchAll(/(?<=^|\.)\d+\./g)) {
    if (pieces.length >= 2 * MOST_NUMBERS) break;
    put('path', found.index);
    put('path number', found.index + found[0].length);
  }
  put('path', end);
  put('last', key.length);
  return pieces;
}
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
      node.append(visible(key.slice(at, s)), el('mark', {}, key.slice(s, e)));
      at = e;
    }
    node.append(visible(key.slice(at, to)));
    return node;
  };
  cell.title = visible(key);
  if (!key.trim()) cell.append(el('span', { class: 'path' }, named(key)));
  else cell.append(...keyPieces(key).map(([className, from, to]) => put(el('span', { class: className }), from, to)));
}

// How bad a tensor's numbers are, in the checkpoint that is shown and then in the other: what breaks the graver rules first, then by how much is not finite; then the largest.
const isSick = (tensor) => firstFlagOf(tensor) || otherFlagOf(tensor);
const gravity = (tensor) => (flagOf(tensor)?.bad ? 4 : firstFlagOf(tensor)?.bad || otherFlagOf(tensor)?.bad ? 3 : flagOf(tensor) ? 2 : isSick(tensor) ? 1 : statsOf(tensor) ? 0 : -1);
const notFinite = (tensor) => { const stats = statsOf(tensor); return stats ? badCount(stats) : 0; };
const byBadness = (a, b) => gravity(a) - gravity(b) || notFinite(a) - notFinite(b) || a.bytes - b.bytes;

const list = {
  query: '', match: matcher(''), dtype: -1, role: '', filter: '', scope: null, by: 'bytes', descending: true, orders: new Map(), items: [],

  order() {
    if (!this.orders.has(this.by)) {
      const compare = {
        key: (a, b) => natural(a.key, b.key), bytes: (a, b) => a.bytes - b.bytes, chunks: (a, b) => a.chunks - b.chunks,
        dtype: (a, b) => natural(a.dtypeName, b.dtypeName), shape: (a, b) => volume(a.shape) - volume(b.shape),
        change: (a, b) => rankOfChange(a) - rankOfChange(b),
        grave: byBadness, bad: (a, b) => notFinite(a) - notFinite(b),
        zero: (a, b) => (MEASURES.zero(a) ?? -1) - (MEASURES.zero(b) ?? -1), rms: (a, b) => (MEASURES.rms(a) ?? -1) - (MEASURES.rms(b) ?? -1),
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
    if (scope.kind === 'set') return (tensor) => scope.set.has(tensor.i);
    if (scope.kind === 'module') return (tensor) => tensor.key === scope.path || tensor.key.startsWith(`${scope.path}.`);
    const rows = data.holders.map((files) => files.some((file) => scope.files.has(file)));
    return (tensor) => rows[tensor.holders];
  },

  update() {
    const start = performance.now();
    const inScope = this.inScope();
    const passes = this.filter ? FILTERS[this.filter][1] : () => true;
    this.items = this.order().filter((tensor) => (this.dtype < 0 || tensor.dtype === this.dtype) && (!this.role || tensor.role === this.role)
      && inScope(tensor) && passes(tensor) && this.match.test(tensor));
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

  filterBy(filter) {
    this.filter = filter;
    $('number-filter').value = filter;
    if (filter) { this.by = filter === 'zero' ? 'zero' : 'grave'; this.descending = true; this.ordered = true; }
    this.update();
  },
  within(scope) { this.scope = scope; this.update(); },
  // Lists what something counts, and all of it: whatever else narrows the list is let go.
  only({ filter = '', scope = null }) {
    this.forget();
    this.scope = scope;
    if (filter) this.filterBy(filter); else this.update();
  },
  isNarrowed() { return Boolean(this.scope || this.role || this.filter || this.query || this.dtype >= 0); },
  forget() {
    this.scope = null; this.dtype = -1; this.role = ''; this.filter = ''; this.query = ''; this.match = matcher('');
    $('search').value = ''; $('dtype-filter').value = '-1'; $('role-filter').value = ''; $('number-filter').value = '';
  },
  nothing() {
    const clear = el('button', { type: 'button', class: 'quiet', id: 'clear-filters', on: { click: () => { this.forget(); this.update(); $('search').focus(); } } }, 'Clear filters');
    return [el('span', {}, whyNothing(this.match.words)), ...(this.isNarrowed() ? [' ', clear] : [])];
  },
  sortBy(id) {
    this.descending = this.by === id ? !this.descending : !['key', 'dtype'].includes(id);
    this.by = id;
    this.ordered = true;
    this.update();
  },
  // Until somebody asks for an order: what breaks rules, if anything does, then the largest.
  orderByDefault() { if (!this.ordered) { this.by = tensors.some(isSick) ? 'grave' : 'bytes'; this.descending = true; } },
  // Brings a tensor's row into view, letting go of whatever hides it.
  reveal(tensor) {
    if (!this.items.includes(tensor)) {
      this.forget();
      this.update();
    }
    this.rows.go(this.items.indexOf(tensor), false);
  },

  // The columns: those of numbers are there once the numbers are.
  build() {
    const largest = tensors.reduce((most, tensor) => Math.max(most, tensor.bytes), 1);
    const text = (get) => (tensor, cell) => { cell.textContent = get(tensor); };
    const alarm = (cell, kind) => { cell.classList.toggle('alarm', kind === 'bad'); cell.classList.toggle('caution', kind === 'warn'); };
    const measured = [
      { id: 'bad', title: 'NaN, Inf', sortable: true, className: 'num bad', cell(tensor, cell) {
        const stats = statsOf(tensor);
        const bad = stats ? badCount(stats) : 0;
        cell.textContent = !stats ? '' : bad ? count(bad) : '0';
        cell.title = stats && bad ? `${count(stats.nans)} NaN, ${count(stats.infs)} Inf` : '';
        cell.classList.toggle('nothing', !bad);
        alarm(cell, breach([flagOf(tensor)], FINITE_RULES));
      } },
      { id: 'zero', title: 'Zero', sortable: true, className: 'num zero', cell(tensor, cell) {
        const stats = statsOf(tensor);
        cell.textContent = stats ? percent(stats.zeros, stats.count) : '';
        cell.classList.toggle('nothing', !stats?.zeros);
        const flag = flagOf(tensor);
        alarm(cell, flag?.rules.some((rule) => /zero|dead/.test(rule)) ? 'warn' : '');
      } },
      { id: 'rms', title: 'RMS', sortable: true, className: 'num rms', cell(tensor, cell) {
        const stats = statsOf(tensor);
        cell.textContent = stats ? number(stats.rms) : '';
        const flag = flagOf(tensor);
        alarm(cell, breach([flag], SIZE_RULES));
        cell.title = flag ? `breaks ${flag.rules.join(', ')}` : '';
      } },
    ];
    this.rows = new Rows($('table'), {
      label: 'Tensors', nothing: () => this.nothing(), choose: (tensor) => show(tensor), sort: (id) => this.sortBy(id),
      columns: [
        { id: 'key', title: 'Name', sortable: true, className: 'key mono', cell: (tensor, cell) => {
          cell.classList.toggle('flagged-bad', Boolean(flagOf(tensor)?.bad)); cell.classList.toggle('flagged-warn', flagOf(tensor)?.bad === false);
          keyCell(tensor.key, this.match.words, cell);
        } },
        ...(isCompared() ? [{ id: 'change', title: 'Change', sortable: true, className: 'change', cell: changeCell }] : []),
        { id: 'dtype', title: 'Type', sortable: true, className: 'dtype', cell(tensor, cell) { cell.textContent = tensor.dtypeName; cell.title = tensor.dtypeName; } },
        { id: 'shape', title: 'Shape', sortable: true, className: 'shape', cell: text((tensor) => shapeText(tensor.shape)) },
        { id: 'chunks', title: 'Chunks', sortable: true, className: 'num chunks', cell: text((tensor) => count(tensor.chunks)) },
        ...(numbers ? measured : []),
        {
          id: 'bytes', title: 'Bytes', sortable: true, className: 'num size',
          cell(tensor, cell) {
            // By the square root, or all but the largest would have no bar.
            const css = { '--part': String(Math.sqrt(tensor.bytes / largest)), '--hue': rolesFound.length > 2 ? roleHue(tensor.role) : `var(--c${tensor.part ?? 0})` };
            cell.append(el('i', { class: 'meter', 'aria-hidden': 'true', css }), bytes(tensor.bytes));
          },
        },
      ],
    });
    $('table').classList.toggle('with-change', isCompared());
    $('table').classList.toggle('with-numbers', Boolean(numbers));
    $('number-filter').hidden = !numbers;
    this.orders.clear();
  },

  start() {
    this.build();
    this.orderByDefault();
    const redraw = () => { this.build(); this.orderByDefault(); this.update(); };
    onNumbers.push(redraw);
    onSide.push(redraw);
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
    const options = (id, all, choices, choose) => {
      $(id).replaceChildren(el('option', { value: '' }, all), ...choices.map(([value, text]) => el('option', { value }, text)));
      $(id).addEventListener('change', (event) => choose(event.target.value));
    };
    options('role-filter', 'All roles', rolesFound.map(([id, name]) => [id, name]), (role) => { this.role = role; this.update(); });
    $('role-filter').hidden = rolesFound.length < 2;
    options('number-filter', 'Any numbers', Object.entries(FILTERS).map(([id, [name]]) => [id, name]), (filter) => this.filterBy(filter));
    $('dtype-filter').addEventListener('change', (event) => { this.dtype = Number(event.target.value); this.update(); });
    this.update();
  },
};

// Layers as a strip: a heat map of modules and statistics, or of layers and the tensors in them.

// What is known of several tensors together.
function gathered(list) {
  const sum = { tensors: list, count: 0, bad: 0, zeros: 0, squares: 0, finite: 0, most: 0, update: null, moved: null, lost: 0, states: 0, sickStates: [], flags: [] };
  let moved = 0; let weighed = 0;
  for (const tensor of list) {
    const stats = statsOf(tensor);
    const flag = flagOf(tensor);
    if (flag) sum.flags.push(flag);
    if (stats) {
      const finite = stats.count - badCount(stats);
      sum.count += stats.count; sum.bad += badCount(stats); sum.zeros += stats.zeros; sum.finite += finite;
      sum.squares += (stats.rms ?? 0) ** 2 * finite;
      sum.most = Math.max(sum.most, Math.abs(stats.min ?? 0), Math.abs(stats.max ?? 0));
    }
    for (const state of isState(tensor) ? [tensor] : stateOf.get(tensor.i) ?? []) {
      sum.states += 1;
      if (flagOf(state)) sum.sickStates.push(state);
    }
    const update = updateOf(tensor);
    if (update !== undefined) sum.update = Math.max(sum.update ?? 0, update);
    const what = change.get(tensor.i);
    const before = firstStatsOf(tensor);
    if (isCompared() && valuesCompared && what !== 'only_a' && before) {
      if (what?.newly_bad) { sum.lost += 1; continue; }
      const weight = (before.rms ?? 0) ** 2 * before.count;
      const far = what === undefined ? 0 : what.moved;
      if (far !== undefined && far !== null) { moved += far ** 2 * weight; weighed += weight; }
    }
  }
  sum.rms = sum.finite ? Math.sqrt(sum.squares / sum.finite) : null;
  // What is no longer finite in part has moved to nowhere.
  if (sum.lost) sum.moved = NaN;
  else if (weighed) sum.moved = Math.sqrt(moved / weighed);
  return sum;
}
// Each says how it is told from what is gathered, and when it is a reason to look, and how grave: only rules make one.
const STATISTICS = [
  { id: 'bad', title: 'NaN, Inf', of: (sum) => sum.bad, text: (x) => count(x), alarm: (sum) => breach(sum.flags, FINITE_RULES) },
  { id: 'zeros', title: 'Zero', of: (sum) => (sum.count ? sum.zeros / sum.count : null), text: (x) => percent(x, 1), alarm: (sum) => breach(sum.flags, ['zero-weight', 'mostly-zero']), linear: true },
  { id: 'rms', title: 'RMS', of: (sum) => sum.rms, text: number, alarm: (sum) => breach(sum.flags, SIZE_RULES) },
  { id: 'most', title: 'Largest', of: (sum) => sum.most, text: number, alarm: (sum) => breach(sum.flags, ['large-weight', 'outlier-weight', 'large-second-moment']) },
  { id: 'update', title: 'Next update', of: (sum) => sum.update, text: number, alarm: (sum) => breach(sum.flags, ['large-update']) },
  { id: 'moved', title: 'Moved', of: (sum) => sum.moved, text: number, alarm: (sum) => (sum.lost ? 'bad' : '') },
  { id: 'state', title: 'Optimizer', of: (sum) => (sum.states ? sum.sickStates.length : null), text: count, alarm: (sum) => (sum.sickStates.some((state) => flagOf(state).bad) ? 'bad' : sum.sickStates.length ? 'warn' : '') },
];

const strip = {
  mode: 'all', MOST: 480, MOST_ROWS: 24,

  // The modules of the model, in the order of their names: each layer of a stack is one, and what is outside of all stacks.
  modules() {
    const stacks = new Map();
    const model = tensors.filter((tensor) => statsOf(tensor) && !isState(tensor) && tensor.shape.length > 0);
    const place = (tensor) => /^(.*?)\.(\d+)\./.exec(tensor.key);
    for (const tensor of model) {
      const found = place(tensor);
      if (found) stacks.set(found[1], (stacks.get(found[1]) ?? new Set()).add(found[2]));
    }
    const groups = new Map();
    for (const tensor of model) {
      const found = place(tensor);
      const inStack = found && stacks.get(found[1]).size > 1;
      const id = inStack ? `${found[1]}.${found[2]}` : tensor.key.slice(0, Math.max(tensor.key.lastIndexOf('.'), 0)) || tensor.key;
      if (!groups.has(id)) groups.set(id, { id, label: inStack ? found[2] : id.split('.').pop(), stack: inStack ? found[1] : null, tensors: [] });
      groups.get(id).tensors.push(tensor);
    }
    // State whose weights are not here, where something is wrong with it, stands by itself.
    const strays = strayStates.filter(flagOf);
    if (strays.length) groups.set(stateRoot, { id: stateRoot.slice(0, -1), label: 'state', stack: null, tensors: strays });
    const all = [...groups.values()].sort((a, b) => natural(a.id, b.id));
    if (all.length <= this.MOST) return all;
    // Too many to tell apart: neighbours together.
    const each = Math.ceil(all.length / this.MOST);
    const few = [];
    for (let i = 0; i < all.length; i += each) {
      const some = all.slice(i, i + each);
      const last = some.at(-1);
      few.push({ id: some[0] === last ? last.id : `${some[0].id} … ${last.id}`, label: some[0].label, stack: null, tensors: some.flatMap((m) => m.tensors) });
    }
    return few;
  },

  // One row: a value for each column, and how to say it.
  rows(modules) {
    if (this.mode === 'all') {
      const sums = modules.map((module) => gathered(module.tensors));
      return { left: '', rows: STATISTICS.map((statistic) => ({ title: statistic.title, statistic, sums, values: sums.map(statistic.of) }))
        .filter(({ values }) => values.some((value) => value !== null)) };
    }
    const statistic = STATISTICS.find(({ id }) => id === this.mode);
    const names = new Map();
    modules.forEach((module, column) => {
      for (const tensor of module.tensors) {
        const name = (tensor.key.slice(module.id.length + 1) || tensor.key).replace(/(^|\.)\d+(?=\.|$)/g, '$1*');
        if (!names.has(name)) names.set(name, new Array(modules.length).fill(null));
        (names.get(name)[column] ??= []).push(tensor);
      }
    });
    const rows = [...names].map(([title, columns]) => {
      const sums = columns.map((some) => some && gathered(some));
      const values = columns.map((some) => some && this.worst(statistic, some));
      return { title, statistic, sums, values, sick: sums.some((sum) => sum && (sum.flags.length || sum.sickStates.length)) };
    });
    // What breaks a rule is never among what has no room.
    rows.sort((a, b) => b.sick - a.sick);
    const rest = rows.splice(this.MOST_ROWS);
    const sick = rest.filter((row) => row.sick).length;
    return { rows, left: rest.length ? `and ${count(rest.length)} more, ${sick ? `${count(sick)} of which break rules` : 'all calm'}` : '' };
  },
  // Experts that are alike share a row: of several tensors the worst counts, not what they are together.
  worst(statistic, some) {
    const values = some.map((tensor) => statistic.of(gathered([tensor]))).filter((value) => value !== null);
    return values.some(Number.isNaN) ? NaN : values.length ? greatest(values, -Infinity) : null;
  },

  draw() {
    const box = $('strip');
    let modules = this.modules();
    if (this.mode !== 'all') {
      const sizes = new Map();
      for (const module of modules) if (module.stack !== null) sizes.set(module.stack, (sizes.get(module.stack) ?? 0) + 1);
      const stack = [...sizes].sort((a, b) => b[1] - a[1])[0]?.[0];
      if (stack !== undefined) modules = modules.filter((module) => module.stack === stack);
    }
    if (modules.length < 2) { box.replaceChildren(); $('strip-by').replaceChildren(); return; }
    const { rows, left } = this.rows(modules);
    const gap = Math.min(0.04, modules.length / 1200);
    const said = el('p', { class: 'said mono', role: 'status', 'aria-live': 'polite' });
    const lines = rows.map((row, r) => {
      const known = row.values.filter((value) => value !== null && Number.isFinite(value));
      const scale = row.statistic.linear ? (x) => x : (x) => Math.log10(Math.max(x, 1e-30));
      const sizes = known.filter((value) => row.statistic.linear || value > 0).map(scale);
      let low = -greatest(sizes.map((x) => -x), -Infinity); let high = greatest(sizes, -Infinity);
      if (row.statistic.linear) { low = 0; high = Math.max(high, 0.5); } else if (high - low < 1) { const middle = (low + high) / 2; low = middle - 0.5; high = middle + 0.5; }
      const chart = svg('svg', { viewBox: `0 0 ${modules.length} 1`, preserveAspectRatio: 'none', class: 'strip-row', 'aria-hidden': 'true' });
      row.values.forEach((value, i) => {
        if (value === null) return;
        const alarm = row.statistic.alarm(row.sums[i]);
        const part = value > 0 || row.statistic.linear ? Math.min(Math.max((scale(value) - low) / ((high - low) || 1), 0), 1) : 0;
        const quiet = ['bad', 'state'].includes(row.statistic.id) && !alarm && !value;
        const rect = svg('rect', { x: i + gap, y: 0, width: 1 - 2 * gap, height: 1, class: alarm === 'bad' ? 'alarm' : alarm ? 'caution' : quiet ? 'quiet' : undefined });
        rect.style.setProperty('--mix', `${Math.round(10 + 82 * part)}%`);
        chart.append(rect);
      });
      chart.addEventListener('pointermove', (event) => {
        const area = chart.getBoundingClientRect();
        this.point(r, Math.floor(((event.clientX - area.left) / area.width) * modules.length), event.clientX, event.clientY);
      });
      chart.addEventListener('pointerleave', () => { tip.hide(); this.mark(-1); });
      chart.addEventListener('click', () => this.choose());
      return [el('span', { class: 'strip-name', title: row.title }, row.title), el('div', { class: 'strip-cell' }, chart),
        el('span', { class: 'strip-range soft' }, known.length ? `${row.statistic.text(-greatest(known.map((x) => -x), -Infinity))} – ${row.statistic.text(greatest(known, -Infinity))}` : '')];
    });
    const labels = el('div', { class: 'strip-labels soft' });
    const room = Math.max(1, Math.ceil(modules.length / Math.max(4, (box.clientWidth - 200) / 44)));
    const letters = Math.max(5, Math.floor((((box.clientWidth - 200) / modules.length) * room) / 7));
    modules.forEach((module, i) => { if (i % room === 0) labels.append(el('span', { title: module.label, css: { '--at': String((i + 0.5) / modules.length) } }, module.label.length > letters ? `${module.label.slice(0, letters - 1)}…` : module.label)); });
    const grid = el('div', {
      class: 'strip-grid', tabindex: 0, role: 'img',
      'aria-label': `Heat map: ${plural(rows.length, this.mode === 'all' ? 'statistic' : 'tensor')} of ${plural(modules.length, 'module')}. Arrow keys move, Enter lists the tensors.`,
    }, ...lines.flat(), el('span', {}), labels, el('span', {}));
    grid.addEventListener('keydown', (event) => {
      const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (move) { event.preventDefault(); this.point((this.row ?? 0) + move[0], (this.column ?? -1) + move[1]); } else if (event.key === 'Enter') this.choose();
    });
    Object.assign(this, { shown: { modules, rows, grid, said }, row: 0, column: -1 });
    box.replaceChildren(grid, ...(left ? [el('p', { class: 'soft note', id: 'strip-left' }, left)] : []), said);
    const ids = new Set(STATISTICS.filter((statistic) => modules.some((module) => statistic.of(gathered(module.tensors)) !== null)).map(({ id }) => id));
    const stacked = modules.some((module) => module.stack !== null);
    segmented($('strip-by'), stacked ? [['all', 'All statistics'], ...STATISTICS.filter(({ id }) => ids.has(id)).map(({ id, title }) => [id, title])] : [], this.mode,
      (mode) => { this.mode = mode; this.draw(); });
  },
  mark(column) {
    const { modules, grid } = this.shown;
    grid.style.setProperty('--column', String(column / modules.length));
    grid.style.setProperty('--columns', String(1 / modules.length));
    grid.classList.toggle('marked', column >= 0);
  },
  point(row, column, x, y) {
    const { modules, rows, said } = this.shown;
    this.row = Math.min(Math.max(row, 0), rows.length - 1);
    this.column = Math.min(Math.max(column, 0), modules.length - 1);
    this.mark(this.column);
    const module = modules[this.column];
    const at = rows[this.row];
    const value = at.values[this.column];
    said.textContent = visible(`${module.id}${this.mode === 'all' ? '' : `.${at.title}`} · ${at.statistic.title} ${value === null ? '–' : at.statistic.text(value)}`);
    if (x === undefined) return;
    const sum = at.sums[this.column] ?? gathered([]);
    tip.show(x, y, `${module.id}${this.mode === 'all' ? '' : `.${at.title}`}`, [
      ['Tensors', count(sum.tensors.length)], this.mode !== 'all' && sum.tensors.length > 1 && [`Worst ${at.statistic.title}`, at.statistic.text(value)],
      ...STATISTICS.map((s) => [s, s.of(sum)]).filter(([, v]) => v !== null).map(([s, v]) => [s.title, s.text(v)]),
      sum.flags.length > 0 && ['Breaks', [...new Set(sum.flags.flatMap((flag) => flag.rules))].join(', ')], ['Click', 'to list its tensors'],
    ]);
  },
  choose() {
    if (this.column < 0) return;
    const module = this.shown.modules[this.column];
    list.only({ scope: { kind: 'set', label: module.id, set: new Set([...module.tensors, ...gathered(module.tensors).sickStates].map((tensor) => tensor.i)) } });
    tip.hide();
    $('tensors').scrollIntoView({ behavior: calm.matches ? 'auto' : 'smooth', block: 'start' });
  },
};

// The table holds the first checkpoint's tensors: what is wrong with those that it lacks is among the changes.
function newOnes() {
  const flags = Object.values(numbers.new_flags ?? {});
  if (!flags.length) return [];
  return [el('button', {
    type: 'button', class: `count-chip ${flags.some((flag) => flag.bad) ? 'is-bad' : 'is-warn'}`, id: 'new-flags',
    on: { click: () => { $('diff').querySelector('[data-value="only-b"]')?.click(); $('diff').scrollIntoView({ behavior: calm.matches ? 'auto' : 'smooth', block: 'start' }); } },
  }, el('b', {}, count(flags.length)), `only in ${nameB} break${flags.length === 1 ? 's' : ''} a rule`)];
}

// The card: what is wrong at a glance, each a filter of the table; then the strip.
function numbersSection() {
  if (!numbers) return;
  const known = tensors.filter(statsOf);
  if (!known.length) return;
  $('numbers').hidden = false;
  // A chip counts what its filter lists; it is as grave as the rules that those break.
  const chip = (filter, text) => {
    const some = tensors.filter(FILTERS[filter][1]);
    const kind = some.some((tensor) => flagOf(tensor)?.bad) ? 'is-bad' : some.some(flagOf) ? 'is-warn' : 'is-none';
    return el('button', {
      type: 'button', class: `count-chip ${kind}`, 'data-filter': filter,
      on: { click: () => { list.only({ filter }); $('tensors').scrollIntoView({ behavior: calm.matches ? 'auto' : 'smooth', block: 'start' }); } },
    }, el('b', {}, count(some.length)), text);
  };
  $('number-counts').replaceChildren(
    ...[['nan', 'with NaN'], ['inf', 'with Inf'], ['zero', 'all zero'], ['flagged', 'break a rule']].map(([filter, text]) => chip(filter, text)),
    el('span', { class: 'soft' }, `of ${plural(known.length, 'tensor')} read${data.diff ? ` in ${shown.name}` : ''}`), ...(side === 'b' ? newOnes() : []));
  strip.draw();
}
onNumbers.push(numbersSection);
onSide.push(numbersSection);
// As many labels as have room.
new ResizeObserver(() => { const wide = $('strip').clientWidth; if (numbers && wide && wide !== strip.wide) { strip.wide = wide; strip.draw(); } }).observe($('strip'));

// The head of the page, bytes per rank and file, element types, plain values.

function summary() {
  const { checkpoint } = data;
  $('format').textContent = [...new Set([checkpoint.format, checkpoint.writer])].filter(Boolean).join(' · ');
  const split = checkpoint.name.lastIndexOf('/');
  $('name').replaceChildren(...(split > 0 ? [el('span', { class: 'parent' }, checkpoint.name.slice(0, split + 1)), el('wbr')] : []), visible(checkpoint.name.slice(split + 1)));
  $('location').textContent = visible(checkpoint.location);
  verdict(health, otherHealth);
  const tile = (label, value, note) => el('div', {}, el('dt', {}, label), el('dd', {}, value, note && el('small', {}, note)));
  $('tiles').replaceChildren(
    tile('Tensors', count(tensors.length), `${bigCount(total.elements)} elements`),
    tile('Bytes', bytes(total.bytes), data.files.length ? `${bytes(total.stored)} stored` : null),
    tile('Chunks', count(total.chunks), tensors.length ? `${(total.chunks / tensors.length).toFixed(1)} per tensor` : null),
    tile('Files', count(data.files.length), ranked ? `by ${plural(ranks.length, 'rank')}` : null),
    ...(checkpoint.step !== undefined ? [tile('Step', count(checkpoint.step), checkpoint.saved)] : []));
  const facts = [...(checkpoint.step === undefined && checkpoint.saved ? [['Saved', checkpoint.saved]] : []), ...(checkpoint.facts ?? [])];
  $('facts').replaceChildren(...facts.map(([label, text]) => el('div', {}, el('dt', {}, label), el('dd', {}, text))));
}
function bigCount(n) {
  for (const [size, word] of [[1e12, 'T'], [1e9, 'B'], [1e6, 'M']]) if (n >= size) return `${(n / size).toPrecision(3)} ${word}`;
  return count(n);
}

const holdersChart = {
  by: ranked ? 'rank' : 'file',
  groups() {
    if (this.by === 'file') return data.files.map((file, i) => ({ name: file.path, bytes: file.bytes, files: new Set([i]), hue: hueOf(i, data.files.length) }));
    const groups = ranks.map((rank, i) => ({ name: `rank ${rank}`, bytes: 0, files: new Set(), hue: hueOf(i, ranks.length) }));
    data.files.forEach((file, i) => { const group = groups[rankPlace.get(file.rank)]; group.bytes += file.bytes; group.files.add(i); });
    return groups;
  },
  narrow(group) {
    list.only({ scope: { kind: 'files', label: group.name, files: group.files } });
    $('tensors').scrollIntoView({ behavior: calm.matches ? 'auto' : 'smooth', block: 'start' });
  },
  draw() {
    const groups = this.groups();
    if (!groups.length) return $('files-body').replaceChildren(el('p', { class: 'empty' }, 'No data files.'));
    const most = greatest(groups.map((group) => group.bytes), 1);
    const mean = groups.reduce((sum, group) => sum + group.bytes, 0) / groups.length;
    const lean = mean ? most / mean : 1;
    const note = el('p', { class: 'soft note' }, `${plural(groups.length, this.by)}, ${bytes(mean)} each on average; the largest holds ${lean.toFixed(2)} × that`);
    const facts = (group) => [
      ['Bytes', `${bytes(group.bytes)} · ${percent(group.bytes, total.stored)}`],
      ['Against mean', `${(group.bytes / (mean || 1)).toFixed(2)} ×`], ['Click', 'to list its tensors'],
    ];
    if (groups.length <= 16) {
      const name = Math.min(22, 4 + Math.max(...groups.map((group) => group.name.length)));
      $('files-body').replaceChildren(el('ul', { class: 'bars', css: { '--name': `${name}ch` } }, ...groups.map((group) => el('li', {}, el('button', {
        type: 'button', css: { '--hue': group.hue, '--part': String(group.bytes / most) },
        'aria-label': `${group.name}, ${bytes(group.bytes)}; list its tensors`,
        on: { click: () => this.narrow(group), pointermove: (event) => tip.show(event.clientX, event.clientY, group.name, facts(group)), pointerleave: () => tip.hide() },
      }, el('span', { class: 'bar-name', title: group.name }, swatch(group.hue), group.name),
      el('span', { class: 'bar-track' }, el('i', {})), el('span', { class: 'bar-size' }, bytes(group.bytes)))))), note);
      return;
    }
    // Many: a skyline, one column each, walked with the arrow keys.
    const W = 640; const H = 190; const step = W / groups.length;
    const chart = svg('svg', {
      viewBox: `0 0 ${W} ${H}`, class: 'skyline', role: 'img', tabindex: 0, preserveAspectRatio: 'none',
      'aria-label': `Bytes of ${groups.length} ${this.by}s. Arrow keys step, Enter lists its tensors.`,
    });
    const gap = step > 4 ? 1 : step > 2 ? 0.4 : 0;
    for (const [i, group] of groups.entries()) {
      const height = Math.max(1, (group.bytes / most) * (H - 4));
      chart.append(svg('rect', { x: i * step, y: H - height, width: Math.max(step - gap, 0.3), height, fill: group.hue }));
    }
    const average = H - (mean / most) * (H - 4);
    chart.append(svg('line', { x1: 0, x2: W, y1: average, y2: average, class: 'mean', 'vector-effect': 'non-scaling-stroke' }));
    const cursor = svg('rect', { class: 'cursor', x: 0, y: 0, width: Math.max(step, 1), height: H, visibility: 'hidden' });
    chart.append(cursor);
    const said = el('p', { class: 'said', role: 'status', 'aria-live': 'polite' });
    let at = -1;
    const point = (i, x, y) => {
      at = Math.min(Math.max(i, 0), groups.length - 1);
      cursor.setAttribute('x', at * step); cursor.setAttribute('visibility', 'visible');
      said.textContent = visible(`${groups[at].name} · ${bytes(groups[at].bytes)}`);
      if (x !== undefined) tip.show(x, y, groups[at].name, facts(groups[at]));
    };
    chart.addEventListener('pointermove', (event) => {
      const area = chart.getBoundingClientRect();
      point(Math.floor(((event.clientX - area.left) / area.width) * groups.length), event.clientX, event.clientY);
    });
    chart.addEventListener('pointerleave', () => { tip.hide(); cursor.setAttribute('visibility', 'hidden'); });
    chart.addEventListener('click', () => { if (at >= 0) this.narrow(groups[at]); });
    chart.addEventListener('keydown', (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (move) { event.preventDefault(); point(at + move); } else if (event.key === 'Enter' && at >= 0) this.narrow(groups[at]);
    });
    $('files-body').replaceChildren(chart, el('div', { class: 'ends soft' }, el('span', {}, groups[0].name), said, el('span', {}, groups.at(-1).name)), note);
  },
  start() {
    if (ranked && data.files.length !== ranks.length) segmented($('files-by'), [['rank', 'Rank'], ['file', 'File']], this.by, (by) => { this.by = by; this.draw(); });
    this.draw();
  },
};

// Of two checkpoints a card tells which one it is about.
const whoseCard = (name = nameA) => (data.diff ? el('span', { class: 'whose' }, `of ${name}`) : null);

// A name of any length, cut in its middle.
const MOST_NAME = 48;
const shortened = (name) => (name.length > MOST_NAME ? `${name.slice(0, MOST_NAME / 2)}…${name.slice(-MOST_NAME / 2)}` : name);

// A bar in parts, and the same as a table.
function shares(head, rows, className) {
  return el('div', { class: className },
    stack(rows.map((row) => ({ hue: row.hue, size: row.bytes }))),
    plainTable([[head], ['Tensors', 'num'], ['Bytes', 'num'], ['Share', 'num']],
      rows.map((row) => [[swatch(row.hue), el('span', { title: row.name }, shortened(row.name))], count(row.tensors), bytes(row.bytes), percent(row.bytes, total.bytes)])));
}
function sharesCharts() {
  const types = data.dtypes.map((name, i) => ({ name, bytes: 0, tensors: 0, hue: typeHue(i) }));
  for (const tensor of tensors) { types[tensor.dtype].bytes += tensor.bytes; types[tensor.dtype].tensors += 1; }
  types.sort((a, b) => b.bytes - a.bytes);
  const largest = parts.slice(0, HUES).map((part, i) => ({ name: part.path || part.name, bytes: part.bytes, tensors: part.tensors, hue: `var(--c${i})` }));
  const few = parts.length > 1 && parts.length <= 40;
  const roles = rolesFound.map(([id, name, hue]) => {
    const some = tensors.filter((tensor) => tensor.role === id);
    return { name, hue, tensors: some.length, bytes: some.reduce((sum, tensor) => sum + tensor.bytes, 0) };
  }).sort((a, b) => b.bytes - a.bytes);
  $('dtypes-body').replaceChildren(shares('Type', types), roles.length > 2 ? shares('Role', roles, 'parts')
    : few ? shares(parts.length > HUES ? 'Largest parts' : 'Part', largest, 'parts') : '');
}

function plainSection() {
  const values = data.values ?? [];
  if (!values.length) return;
  const most = 200;
  const columns = [['Key', 'mono'], ['Kind', 'soft'], ['Value', 'mono value']];
  const cells = (value) => [named(value.key), value.kind, value.text];
  const table = plainTable(columns, values.slice(0, most).map(cells));
  const more = el('button', { type: 'button', class: 'quiet' }, `Show ${data.values_found > values.length ? '' : 'all '}${count(values.length)}`);
  more.addEventListener('click', () => { for (const value of values.slice(most)) table.tBodies[0].append(plainRow(columns, cells(value))); more.remove(); });
  $('plain').hidden = false;
  $('plain').replaceChildren(
    el('div', { class: 'card-head' }, el('h2', { id: 'plain-title' }, 'Plain values', whoseCard()), el('p', { class: 'soft' }, data.values_found > values.length ? `${count(values.length)} of ${plural(data.values_found, 'value')}` : plural(values.length, 'value'))),
    el('div', { class: 'scroll tall values-table', tabindex: 0, role: 'group', 'aria-label': 'Plain values' }, table), values.length > most ? more : '');
}

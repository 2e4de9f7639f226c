// What a tensor's values look like: the histogram, the statistics, a corner of the numbers.

const bothNames = () => el('span', { class: 'legend' }, el('span', { css: { '--hue': 'var(--c0)' } }, nameA), el('span', { css: { '--hue': 'var(--c5)' } }, nameB));

// Counts by value; another checkpoint's as a line over them, on one axis and by density, for its bins are not as wide.
function histogram({ low, high, counts }, b) {
  const W = 400; const H = 110; const BASE = 92;
  const node = el('figure', { class: 'histogram' });
  let log = false;
  const sum = counts.reduce((x, y) => x + y, 0);
  const edge = (i) => low + ((high - low) * i) / counts.length;
  const other = b?.counts.length && b.high > b.low && high > low ? b : null;
  const [from, to] = other ? [Math.min(low, other.low), Math.max(high, other.high)] : [low, high];
  const across = (value, i) => (other ? ((value - from) / (to - from)) * W : (W / counts.length) * i);
  // The other's counts, as they would be in as many bins of this width among as many values.
  const theirSum = other?.counts.reduce((x, y) => x + y, 0) || 1;
  const theirStep = other && (other.high - other.low) / other.counts.length;
  const theirs = other?.counts.map((n) => (n / theirSum / theirStep) * sum * ((high - low) / counts.length)) ?? [];
  const most = Math.max(1, ...counts, ...theirs);
  const draw = () => {
    const height = (n) => (n === 0 ? 0 : Math.max(1, (log ? Math.log1p(n) / Math.log1p(most) : n / most) * (BASE - 6)));
    const chart = svg('svg', { viewBox: `0 0 ${W} ${H}`, role: 'img', 'aria-label': `Histogram of ${count(sum)} values from ${number(low)} to ${number(high)}${other ? `, ${nameA} against ${nameB}` : ''}` });
    counts.forEach((n, i) => {
      const x = across(edge(i), i); const step = across(edge(i + 1), i + 1) - x;
      if (n) chart.append(svg('rect', { class: 'bin', x: x + Math.min(0.5, step / 4), y: BASE - height(n), width: Math.max(step - 1, 0.5), height: height(n) }));
      // The whole column answers to the pointer, however short its bar.
      chart.append(svg('rect', {
        class: 'catch', x, y: 0, width: step, height: BASE,
        on: {
          pointermove: (event) => tip.show(event.clientX, event.clientY, `${count(n)} values${other ? ` in ${nameA}` : ''}`,
            [['From', number(edge(i))], ['To', number(edge(i + 1))], ['Share', percent(n, sum)]]),
          pointerleave: () => tip.hide(),
        },
      }));
    });
    if (other) {
      const at = (i) => across(other.low + theirStep * i);
      const points = theirs.flatMap((n, i) => [`${at(i)},${BASE - height(n)}`, `${at(i + 1)},${BASE - height(n)}`]);
      chart.append(svg('polyline', { class: 'other', points: `${at(0)},${BASE} ${points.join(' ')} ${at(theirs.length)},${BASE}` }));
    }
    chart.append(svg('line', { x1: 0, x2: W, y1: BASE, y2: BASE, class: 'axis' }));
    if (from < 0 && to > 0) {
      const zero = (-from / (to - from)) * W;
      chart.append(svg('line', { x1: zero, x2: zero, y1: BASE, y2: BASE + 4, class: 'axis' }));
      if (zero > 70 && zero < W - 70) chart.append(svg('text', { x: zero, y: H - 3, 'text-anchor': 'middle' }, '0'));
    }
    chart.append(svg('text', { x: 0, y: H - 3 }, number(from)), svg('text', { x: W, y: H - 3, 'text-anchor': 'end' }, number(to)));
    node.querySelector('svg')?.remove();
    node.prepend(chart);
  };
  const scale = el('div', { class: 'segmented small', role: 'group', 'aria-label': 'Scale of counts' });
  segmented(scale, [['linear', 'Linear'], ['log', 'Log']], 'linear', (choice) => { log = choice === 'log'; draw(); });
  node.append(el('figcaption', {}, other ? bothNames() : el('span', { class: 'soft' }, `${count(sum)} values in ${counts.length} bins`), scale));
  draw();
  return node;
}

// Shares by magnitude, one bar for each power of two; another checkpoint's as a line over them.
function magnitudes(a, b) {
  const W = 400; const H = 110; const BASE = 92;
  const all = [a, b].filter(Boolean);
  const low = Math.min(...all.map((m) => m.low)); const high = Math.max(...all.map((m) => m.low + m.counts.length));
  const step = W / Math.max(high - low, 1);
  const shares = (m) => { const sum = m.counts.reduce((x, y) => x + y, 0) || 1; return Array.from({ length: high - low }, (_, i) => (m.counts[i + low - m.low] ?? 0) / sum); };
  const [ours, theirs] = [shares(a), b && shares(b)];
  const most = greatest([...ours, ...(theirs ?? [])], 1e-9);
  const height = (x) => (x > 0 ? Math.max(1, (x / most) * (BASE - 6)) : 0);
  const chart = svg('svg', { viewBox: `0 0 ${W} ${H}`, role: 'img', 'aria-label': `Shares by magnitude${b ? `, ${nameA} against ${nameB}` : ''}` });
  ours.forEach((x, i) => { if (x > 0) chart.append(svg('rect', { class: 'bin', x: i * step + 0.5, y: BASE - height(x), width: Math.max(step - 1, 0.5), height: height(x) })); });
  if (theirs) {
    const points = theirs.flatMap((x, i) => [`${i * step},${BASE - height(x)}`, `${(i + 1) * step},${BASE - height(x)}`]);
    chart.append(svg('polyline', { class: 'other', points: `0,${BASE} ${points.join(' ')} ${W},${BASE}` }));
  }
  ours.forEach((x, i) => chart.append(svg('rect', {
    class: 'catch', x: i * step, y: 0, width: step, height: BASE,
    on: {
      pointermove: (event) => tip.show(event.clientX, event.clientY, `${number(2 ** (low + i))} to ${number(2 ** (low + i + 1))}`,
        [[b ? nameA : 'Share', percent(x, 1)], theirs && [nameB, percent(theirs[i], 1)]]),
      pointerleave: () => tip.hide(),
    },
  })));
  chart.append(svg('line', { x1: 0, x2: W, y1: BASE, y2: BASE, class: 'axis' }));
  // Powers of ten along the axis, as many as have room.
  const tens = []; for (let e = Math.ceil(low * Math.log10(2)); e <= high * Math.log10(2); e += 1) tens.push(e);
  const every = Math.ceil(tens.length / 7);
  tens.filter((_, i) => i % every === 0).forEach((e) => {
    const x = (e / Math.log10(2) - low) * step;
    chart.append(svg('line', { x1: x, x2: x, y1: BASE, y2: BASE + 4, class: 'axis' }), svg('text', { x, y: H - 3, 'text-anchor': x < 14 ? 'start' : x > W - 14 ? 'end' : 'middle' }, number(10 ** e)));
  });
  const legend = b ? bothNames() : el('span', { class: 'soft' }, 'by power of two, without zeros');
  return el('figure', { class: 'histogram magnitudes' }, chart, el('figcaption', {}, legend));
}

// The distribution, by value or by magnitude; where there are two checkpoints, one against the other.
function distribution(stats, other) {
  const ways = [stats.magnitudes && ['magnitude', 'Magnitude'], stats.histogram?.counts.length && ['value', 'Value']].filter(Boolean);
  if (!ways.length) return null;
  const body = el('div');
  const draw = (way) => body.replaceChildren(way === 'value' ? histogram(stats.histogram, other?.histogram) : magnitudes(stats.magnitudes, other?.magnitudes));
  const choose = el('div', { class: 'segmented small by-what', role: 'group', 'aria-label': 'Distribution by' });
  const first = other?.magnitudes && stats.magnitudes ? 'magnitude' : ways.at(-1)[0];
  if (ways.length > 1) segmented(choose, ways, first, draw);
  draw(first);
  return el('div', { class: 'distribution' }, choose, body);
}

// Numbers that a distribution could be made of: not few, and not all of them zero.
const hasShape = (stats) => stats.count >= 16 && stats.zeros + badCount(stats) < stats.count;

// Of two checkpoints the other's beside them, where they differ.
function statistics({ stats, flag }, { stats: other, name }) {
  // Where nobody asked the rules, whatever is not finite is worth a look.
  const alarm = (rule, n) => (numbers ? flag?.rules.includes(rule) : n > 0) && 'alarm';
  const item = (label, text, kind, before) => el('div', { class: kind }, el('dt', {}, label), el('dd', {}, text, before !== undefined && before !== text && el('small', { class: 'soft' }, `${name}: ${before}`)));
  const pair = (label, of, kind) => item(label, of(stats), kind, other && of(other));
  const most = (s) => number(Math.max(Math.abs(s.min ?? 0), Math.abs(s.max ?? 0)));
  return el('dl', { class: 'stats' },
    pair('NaN', (s) => count(s.nans), alarm('nan', stats.nans)), pair('Inf', (s) => count(s.infs), alarm('inf', stats.infs)),
    pair('zero', (s) => percent(s.zeros, s.count), stats.count > 1 && stats.zeros === stats.count && 'caution'), pair('RMS', (s) => number(s.rms)),
    pair('min', (s) => number(s.min)), pair('max', (s) => number(s.max)), pair('mean', (s) => number(s.mean)), pair('std', (s) => number(s.std)),
    pair('largest', most), stats.subnormals ? pair('subnormal', (s) => percent(s.subnormals ?? 0, s.count)) : null,
    ...(stats.percentiles?.length ? [[3, 'median'], [0, '1 %'], [6, '99 %']].map(([i, name]) => pair(name, (s) => number(s.percentiles?.[i]))) : []));
}

// A corner of the numbers, tinted by sign and size.
function sampleTable(sample) {
  const sizes = sample.rows.flat().filter((v) => typeof v === 'number').map(Math.abs);
  const most = Math.max(...sizes, Number.MIN_VALUE);
  const cell = (value) => {
    if (typeof value !== 'number') return el('td', { class: /nan|inf/.test(value) ? 'alarm' : undefined }, value);
    return el('td', { css: { '--hue': value < 0 ? 'var(--c1)' : 'var(--c0)', '--mix': `${Math.round((28 * Math.abs(value)) / most)}%` } }, number(value));
  };
  const table = el('table', {}, el('tbody', {}, ...sample.rows.map((row) => el('tr', {}, ...row.map(cell)))));
  return el('figure', { class: 'sample' },
    el('div', { class: 'scroll', tabindex: 0, role: 'group', 'aria-label': 'Values' }, table), el('figcaption', { class: 'soft mono' }, sample.slice));
}

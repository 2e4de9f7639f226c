// What a tensor's values look like: the histogram, the statistics, a corner of the numbers.

function histogram({ low, high, counts }) {
  const W = 400; const H = 110; const BASE = 92;
  const node = el('figure', { class: 'histogram' });
  let log = false;
  const sum = counts.reduce((a, b) => a + b, 0);
  const edge = (i) => low + ((high - low) * i) / counts.length;
  const most = Math.max(1, ...counts);
  const draw = () => {
    const height = (n) => (n === 0 ? 0 : Math.max(1, (log ? Math.log1p(n) / Math.log1p(most) : n / most) * (BASE - 6)));
    const step = W / counts.length;
    const chart = svg('svg', { viewBox: `0 0 ${W} ${H}`, role: 'img', 'aria-label': `Histogram of ${count(sum)} values from ${number(low)} to ${number(high)}` });
    counts.forEach((n, i) => {
      if (n) chart.append(svg('rect', { class: 'bin', x: i * step + 0.5, y: BASE - height(n), width: Math.max(step - 1, 0.5), height: height(n) }));
      // The whole column answers to the pointer, however short its bar.
      chart.append(svg('rect', {
        class: 'catch', x: i * step, y: 0, width: step, height: BASE,
        on: {
          pointermove: (event) => tip.show(event.clientX, event.clientY, `${count(n)} values`,
            [['From', number(edge(i))], ['To', number(edge(i + 1))], ['Share', percent(n, sum)]]),
          pointerleave: () => tip.hide(),
        },
      }));
    });
    chart.append(svg('line', { x1: 0, x2: W, y1: BASE, y2: BASE, class: 'axis' }));
    if (low < 0 && high > 0) {
      const zero = (-low / (high - low)) * W;
      chart.append(svg('line', { x1: zero, x2: zero, y1: BASE, y2: BASE + 4, class: 'axis' }));
      if (zero > 70 && zero < W - 70) chart.append(svg('text', { x: zero, y: H - 3, 'text-anchor': 'middle' }, '0'));
    }
    chart.append(svg('text', { x: 0, y: H - 3 }, number(low)), svg('text', { x: W, y: H - 3, 'text-anchor': 'end' }, number(high)));
    node.querySelector('svg')?.remove();
    node.prepend(chart);
  };
  const scale = el('div', { class: 'segmented small', role: 'group', 'aria-label': 'Scale of counts' });
  segmented(scale, [['linear', 'Linear'], ['log', 'Log']], 'linear', (choice) => { log = choice === 'log'; draw(); });
  node.append(el('figcaption', {}, el('span', { class: 'soft' }, `${count(sum)} values in ${counts.length} bins`), scale));
  draw();
  return node;
}

function statistics(stats) {
  const item = (label, text, alarm) => el('div', { class: alarm ? 'alarm' : undefined }, el('dt', {}, label), el('dd', {}, text));
  return el('dl', { class: 'stats' },
    item('min', number(stats.min)), item('max', number(stats.max)), item('mean', number(stats.mean)), item('std', number(stats.std)),
    item('zeros', percent(stats.zeros, stats.count)), item('NaN', count(stats.nans), stats.nans > 0), item('Inf', count(stats.infs), stats.infs > 0));
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

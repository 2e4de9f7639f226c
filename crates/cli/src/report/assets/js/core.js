// Shared tools: making elements (text only, never markup), numbers in words, colours, the tooltip, the theme.

const $ = (id) => document.getElementById(id);
const SVG = 'http://www.w3.org/2000/svg';

// Text that shows what it holds: line ends and characters that would turn the order of those after them are written out.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const SHORT = { '\n': '\\n', '\r': '\\r', '\t': '\\t' };
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/;
function visible(text) {
  const shown = text.replace(UNSEEN, (c) => SHORT[c] ?? `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`);
  // The parts of a name stand in their order, whichever way each is written.
  return RIGHT_TO_LEFT.test(shown) ? shown.replace(/\./g, '\u200e.\u200e') : shown;
}
// A name, also where it is nothing or nothing but spaces.
const named = (name) => (name.trim() ? name : name.replace(/ /g, '␣') || '(no name)');

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === 'on') for (const [type, listener] of Object.entries(value)) node.addEventListener(type, listener);
    else if (name === 'css') for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else node.setAttribute(name, value === true ? '' : value);
  }
  for (const child of children) if (child !== null && child !== undefined && child !== false) node.append(typeof child === 'string' ? visible(child) : child);
  return node;
}
const el = (tag, props, ...children) => fill(document.createElement(tag), props, children);
const svg = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

const whole = new Intl.NumberFormat('en-US');
const count = (n) => whole.format(n);
const plural = (n, one, many = one + 's') => `${count(n)} ${n === 1 ? one : many}`;

function bytes(n) {
  const units = ['B', 'kB', 'MB', 'GB', 'TB', 'PB', 'EB'];
  let unit = 0;
  while (n >= (unit ? 999.5 : 1000) && unit < units.length - 1) { n /= 1000; unit += 1; }
  const digits = unit === 0 || n >= 99.95 ? 0 : n >= 9.995 ? 1 : 2;
  return `${n.toFixed(digits)} ${units[unit]}`;
}
function percent(part, total) {
  if (!total) return '0 %';
  const p = 100 * part / total;
  return p > 0 && p < 0.1 ? '< 0.1 %' : `${p >= 99.95 || p === 0 ? p.toFixed(0) : p.toFixed(1)} %`;
}
function number(x) {
  if (x === null || x === undefined) return '–';
  if (typeof x !== 'number') return String(x);
  if (Number.isInteger(x) && Math.abs(x) < 1e7) return count(x).replace('-', '−');
  const size = Math.abs(x);
  const text = size >= 1e-3 && size < 1e5 ? x.toPrecision(4).replace(/(\.\d*?)0+$/, '$1').replace(/\.$/, '') : x.toExponential(2).replace(/\.?0+e/, 'e');
  return text.replace('-', '−').replace('e−', 'e-').replace('e+', 'e');
}
const shapeText = (shape) => (shape.length ? shape.join(' × ') : 'scalar');
const volume = (sizes) => sizes.reduce((product, size) => product * size, 1);

// Of any number of values: spreading a hundred thousand into Math.max is an error.
const greatest = (values, least) => values.reduce((most, value) => (value > most ? value : most), least);

const natural = new Intl.Collator('en', { numeric: true }).compare;

// Colours are named in the style sheet; a canvas needs them resolved for the theme of the moment.
const probe = el('i', { class: 'visually-hidden', 'aria-hidden': 'true' });
document.body.append(probe);
let resolved = new Map();
function colour(name) {
  if (!resolved.has(name)) {
    probe.style.color = name;
    resolved.set(name, getComputedStyle(probe).color);
  }
  return resolved.get(name);
}

const HUES = 8;
const RAMP = [[53, 42, 134], [49, 92, 158], [33, 136, 148], [74, 178, 120], [167, 207, 82], [244, 226, 92]];
function ramp(t) {
  const at = Math.min(Math.max(t, 0), 1) * (RAMP.length - 1);
  const low = Math.min(Math.floor(at), RAMP.length - 2);
  const mix = RAMP[low].map((from, i) => Math.round(from + (RAMP[low + 1][i] - from) * (at - low)));
  return `rgb(${mix.join(', ')})`;
}
// A few things get a hue each; many get a place on a ramp, which keeps neighbours alike and ends apart.
const hueOf = (index, total) => (total <= HUES ? `var(--c${index})` : ramp(total > 1 ? index / (total - 1) : 0));
// The same for a canvas, which does not know the style sheet's names.
const inkColour = (index, total) => (total <= HUES ? colour(`var(--c${index})`) : ramp(total > 1 ? index / (total - 1) : 0));
function readableOn(rgb) {
  const [r, g, b] = rgb.match(/[\d.]+/g).map(Number).map((v) => {
    const s = v / 255;
    return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.19 ? '#14171a' : '#ffffff';
}

const tip = {
  node: $('tip'),
  show(x, y, title, rows) {
    this.node.replaceChildren(
      el('strong', {}, title),
      ...rows.filter(Boolean).map(([label, text]) => el('div', {}, el('span', {}, label), el('span', {}, text))),
    );
    this.node.hidden = false;
    const { offsetWidth: w, offsetHeight: h } = this.node;
    const left = x + 16 + w > innerWidth ? x - w - 12 : x + 16;
    const top = y + 16 + h > innerHeight ? y - h - 12 : y + 16;
    this.node.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
  },
  hide() { this.node.hidden = true; },
};
addEventListener('scroll', () => tip.hide(), { passive: true, capture: true });
addEventListener('keydown', (event) => { if (event.key === 'Escape') tip.hide(); });

// A row of buttons of which one is pressed.
function segmented(node, choices, chosen, choose) {
  node.replaceChildren(...choices.map(([value, text]) => el('button', {
    type: 'button', 'aria-pressed': String(value === chosen), 'data-value': value,
    on: {
      click(event) {
        for (const button of node.children) button.setAttribute('aria-pressed', String(button === event.currentTarget));
        choose(value);
      },
    },
  }, text)));
}

// A bar in parts: [{ hue, size }].
const stack = (items, props) => el('div', { class: 'stack', 'aria-hidden': 'true', ...props },
  ...items.filter(({ size }) => size).map(({ hue, size }) => el('i', { css: { '--hue': hue, 'flex-grow': String(size) } })));
const swatch = (hue) => el('span', { class: 'swatch', css: { '--hue': hue } });
// A plain table: columns as [title, class], rows as lists of what stands in each cell; the first cell names the row.
function plainRow(columns, cells) {
  return el('tr', {}, ...cells.map((cell, i) => el(i ? 'td' : 'th', { scope: i ? undefined : 'row', class: columns[i][1] }, ...[cell].flat())));
}
function plainTable(columns, rows) {
  return el('table', { class: 'plain-table' },
    el('thead', {}, el('tr', {}, ...columns.map(([title, className]) => el('th', { scope: 'col', class: className === 'num' ? 'num' : undefined }, title)))),
    el('tbody', {}, ...rows.map((cells) => plainRow(columns, cells))));
}

const calm = matchMedia('(prefers-reduced-motion: reduce)');
const dark = matchMedia('(prefers-color-scheme: dark)');
const redraws = [];
const theme = {
  get now() { return document.documentElement.dataset.theme ?? (dark.matches ? 'dark' : 'light'); },
  // Storage is refused to some files opened from disk; then the choice lasts as long as the page.
  remembered() { try { return localStorage.getItem('reshard-theme'); } catch { return null; } },
  set(name, remember) {
    if (name) document.documentElement.dataset.theme = name;
    if (remember) try { localStorage.setItem('reshard-theme', name); } catch { /* as above */ }
    const other = this.now === 'dark' ? 'light' : 'dark';
    $('theme').replaceChildren(
      svg('svg', { viewBox: '0 0 16 16', 'aria-hidden': 'true' },
        svg('circle', { cx: 8, cy: 8, r: 6 }), svg('path', { d: 'M8 2a6 6 0 0 1 0 12z', class: 'half' })),
      other === 'dark' ? 'Dark' : 'Light');
    $('theme').setAttribute('aria-label', `Switch to the ${other} theme`);
    resolved = new Map();
    for (const redraw of redraws) redraw();
  },
};

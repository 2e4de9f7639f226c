// The treemap: squarified boxes by bytes, as many levels at a time as have room, zoomed by clicking, walked by arrow keys.

// Bruls, Huizing, van Wijk: fill the shorter side with as many boxes as keep them closest to squares.
function squarify(items, x, y, w, h, place) {
  let rest = items.reduce((sum, item) => sum + item.bytes, 0);
  let from = 0;
  while (from < items.length && rest > 0 && w > 0.5 && h > 0.5) {
    const side = Math.min(w, h);
    const scale = (w * h) / rest;
    const worst = (area, least, most) => Math.max((side * side * most) / (area * area), (area * area) / (side * side * least));
    let to = from;
    let area = 0;
    let best = Infinity;
    const most = items[from].bytes * scale;
    while (to < items.length) {
      const next = items[to].bytes * scale;
      const ratio = next > 0 ? worst(area + next, next, most) : Infinity;
      if (ratio > best) break;
      best = ratio;
      area += next;
      to += 1;
    }
    if (to === from) break;
    const thick = area / side;
    let along = 0;
    for (let i = from; i < to; i += 1) {
      const length = (items[i].bytes * scale) / thick;
      if (w >= h) place(items[i], x, y + along, thick, length);
      else place(items[i], x + along, y, length, thick);
      along += length;
      rest -= items[i].bytes;
    }
    if (w >= h) { x += thick; w -= thick; } else { y += thick; h -= thick; }
    from = to;
  }
}

// A module's name; of a fold, also what it is a fold of.
const titleOf = (node) => (node.fold ? `${node.path ? `${node.path}: ` : ''}${node.name}, such as ${node.kids[0].name}` : node.path || node.name);
function setScope(label, node) {
  const set = new Set();
  within(node, (tensor) => set.add(tensor.i));
  return { kind: 'set', label, set };
}

const treemap = {
  box: $('map'), at: root, colourBy: rolesFound.length > 2 ? 'role' : 'part', tiles: [], focused: 0,
  LEVELS: 8, MOST: 2400, HEAD: 19,

  // A tensor's colour, and how much of it; a closed module takes those of most of its bytes. Changes are never outvoted: a
  // module with any shows it, the more strongly the more of its bytes they are.
  shade(node, place, siblings) {
    const mix = siblings > 12 ? 42 : 36 + 10 * (place % 3);
    if (this.colourBy === 'part') return [node.part === undefined ? 'var(--muted)' : `var(--c${node.part})`, mix];
    const tally = this.tally(node);
    if (this.colourBy === 'dtype') return [typeHue(this.most(tally)), mix];
    if (this.colourBy === 'role') return [roleHue(this.most(tally)), mix];
    if (this.colourBy === 'numbers') {
      // What is bad is never outvoted, however small.
      const worst = ['bad', 'warn'].find((kind) => tally.has(kind));
      return worst ? [`var(--${worst})`, 38 + 30 * (tally.get(worst) / (node.bytes || 1))] : tally.has('good') ? ['var(--good)', 22] : ['var(--same)', 30];
    }
    const differing = new Map([...tally].filter(([kind]) => kind !== 'same'));
    if (!differing.size) return ['var(--same)', 45];
    const share = 1 - (tally.get('same') ?? 0) / (node.bytes || 1);
    return [`var(--${this.most(differing)})`, 22 + 28 * share];
  },
  most(tally) { return [...tally].reduce((best, entry) => (entry[1] > best[1] ? entry : best))[0]; },
  tally(node) {
    node.tallies ??= {};
    if (node.tallies[this.colourBy]) return node.tallies[this.colourBy];
    const sums = new Map();
    const add = (kind, size) => sums.set(kind, (sums.get(kind) ?? 0) + size);
    if (node.leaf) {
      const what = change.get(node.leaf.i);
      const flag = flagOf(node.leaf);
      add(this.colourBy === 'dtype' ? node.leaf.dtype : this.colourBy === 'role' ? node.leaf.role
        : this.colourBy === 'numbers' ? (flag ? (flag.bad ? 'bad' : 'warn') : statsOf(node.leaf) ? 'good' : 'unknown') : what === undefined ? 'same' : what === 'only_a' ? 'only-a' : 'changed', node.leaf.bytes);
    }
    for (const kid of node.kids) for (const [kind, size] of this.tally(kid)) add(kind, size);
    node.tallies[this.colourBy] = sums;
    return sums;
  },

  draw(zoomedFrom) {
    const { clientWidth: width, clientHeight: height } = this.box;
    // Not laid out yet: the observer of its size draws it when it is.
    if (!width) return;
    const layer = el('div', { class: 'layer' });
    this.tiles = [];
    const add = (node, x, y, w, h, depth, place, siblings) => {
      if (this.tiles.length >= this.MOST || w < 2.5 || h < 2.5) return;
      // A module shows its inside where that leaves room for its own heading; deep down, only where there is plenty.
      const open = !node.leaf && !node.fold && depth < this.LEVELS && (depth <= 3 ? w > 54 && h > 44 : w > 88 && h > 66);
      const [hue, mix] = this.shade(node, place, siblings);
      const left = Math.round(x); const top = Math.round(y);
      const wide = Math.max(1, Math.round(x + w) - left - 2); const high = Math.max(1, Math.round(y + h) - top - 2);
      const what = node.leaf ? `tensor ${node.leaf.dtypeName} ${shapeText(node.leaf.shape)}` : plural(node.tensors, 'tensor');
      const tile = el('div', {
        class: `tile ${node.leaf ? 'leaf' : node.fold ? 'module fold' : 'module'} d${depth}`, role: 'button', tabindex: -1, 'data-path': node.fold ? `${node.path}#${node.name}` : node.path,
        'aria-label': `${titleOf(node)}, ${what}, ${bytes(node.bytes)}`,
        css: { left: `${left}px`, top: `${top}px`, width: `${wide}px`, height: `${high}px`, '--hue': hue, '--mix': `${mix}%` },
      });
      if (open || (wide > 34 && high > 15)) {
        tile.append(el('span', { class: 'label' }, node.name));
        if (open ? wide > 110 : high > 32 && wide > 50) tile.append(el('span', { class: 'size' }, bytes(node.bytes)));
      }
      if (open) tile.classList.add('open');
      tile.node = node;
      this.tiles.push(tile);
      layer.append(tile);
      if (!open) return;
      let kids = 0;
      squarify(node.kids, left + 3, top + this.HEAD, wide - 4, high - this.HEAD - 1, (kid, ...rect) => {
        add(kid, ...rect, depth + 1, kids, node.kids.length);
        kids += 1;
      });
    };
    if (this.at.leaf) add(this.at, 0, 0, width + 2, height + 2, 1, 0, 1);
    else squarify(this.at.kids, 0, 0, width + 2, height + 2, (kid, ...rect) => add(kid, ...rect, 1, 0, this.at.kids.length));
    if (!this.tiles.length) layer.append(el('p', { class: 'empty' }, 'No bytes here.'));
    this.box.replaceChildren(layer);
    this.focused = 0;
    this.tiles[0]?.setAttribute('tabindex', '0');
    if (zoomedFrom && !calm.matches && layer.animate) {
      const [x, y, w, h] = zoomedFrom;
      layer.animate([
        { transform: `translate(${x}px, ${y}px) scale(${w / width}, ${h / height})`, opacity: 0.2 },
        { transform: 'none', opacity: 1 },
      ], { duration: 260, easing: 'cubic-bezier(.2, .7, .2, 1)' });
    }
    this.drawCrumbs();
    this.drawLegend();
  },

  drawCrumbs() {
    const path = [];
    for (let node = this.at; node; node = node.parent) path.unshift(node);
    $('crumbs').replaceChildren(el('ol', {}, ...path.map((node, i) => el('li', {}, i === path.length - 1
      ? el('span', { 'aria-current': 'location' }, node.name)
      : el('button', { type: 'button', on: { click: () => this.zoom(node) } }, node.name)))),
    el('span', { class: 'soft' }, `${bytes(this.at.bytes)} · ${plural(this.at.tensors, 'tensor')}`));
  },

  drawLegend() {
    const entries = this.colourBy === 'dtype' ? data.dtypes.map((name, i) => [name, typeHue(i)])
      : this.colourBy === 'role' ? rolesFound.map(([, name, hue]) => [name, hue])
      : this.colourBy === 'numbers' ? [[`breaks a rule${data.diff ? ` in ${shown.name}` : ''}`, 'var(--bad)'], ['worth a look', 'var(--warn)'], ['no rule broken', 'var(--good)']]
      : this.colourBy === 'change' ? [[unchangedText(), 'var(--same)'], ['changed', 'var(--changed)'], [`only in ${nameA}`, 'var(--only-a)']]
        : parts.slice(0, HUES).map((part, i) => [i === HUES - 1 && parts.length > HUES ? 'others' : part.name, `var(--c${i})`]);
    $('map-legend').replaceChildren(...entries.map(([name, hue]) => el('span', { css: { '--hue': hue } }, name)));
  },

  zoom(node, tile) {
    const from = tile && [tile.offsetLeft, tile.offsetTop, tile.offsetWidth, tile.offsetHeight];
    this.at = node;
    tip.hide();
    this.draw(from);
    list.within(node === root ? null : node.fold ? setScope(titleOf(node), node) : { kind: 'module', label: node.path || node.name, path: node.path });
  },
  open(tile) {
    const { node } = tile;
    if (node.leaf) show(node.leaf, true);
    else { this.zoom(node, tile); this.tiles[0]?.focus({ preventScroll: true }); }
  },

  focus(index) {
    this.tiles[this.focused]?.setAttribute('tabindex', '-1');
    this.focused = index;
    this.tiles[index].setAttribute('tabindex', '0');
    this.tiles[index].focus({ preventScroll: true });
  },
  // The nearest tile in a direction, measured between centres, sideways distance counting double.
  step(dx, dy) {
    const centre = (t) => [t.offsetLeft + t.offsetWidth / 2, t.offsetTop + (t.classList.contains('open') ? 9 : t.offsetHeight / 2)];
    const here = centre(this.tiles[this.focused]);
    let best = -1; let least = Infinity;
    this.tiles.forEach((tile, i) => {
      const there = centre(tile);
      const ahead = (there[0] - here[0]) * dx + (there[1] - here[1]) * dy;
      const aside = Math.abs((there[0] - here[0]) * dy) + Math.abs((there[1] - here[1]) * dx);
      if (i !== this.focused && ahead > 1 && ahead + 2 * aside < least) { least = ahead + 2 * aside; best = i; }
    });
    if (best >= 0) this.focus(best);
  },

  start() {
    const tileOf = (event) => event.target.closest?.('.tile');
    this.box.addEventListener('click', (event) => { const tile = tileOf(event); if (tile) this.open(tile); });
    this.box.addEventListener('pointermove', (event) => {
      const tile = tileOf(event);
      if (!tile) return tip.hide();
      const { node } = tile;
      const stats = node.leaf && statsOf(node.leaf);
      tip.show(event.clientX, event.clientY, titleOf(node), [
        ['Bytes', `${bytes(node.bytes)} · ${percent(node.bytes, total.bytes)}`],
        node.leaf ? ['Tensor', `${node.leaf.dtypeName} · ${shapeText(node.leaf.shape)}`] : ['Tensors', count(node.tensors)],
        node.leaf && ['Cut', cutText(node.leaf)],
        node.leaf && ['Role', ROLES.find(([id]) => id === node.leaf.role)[1]],
        stats && ['RMS', number(stats.rms)],
        node.leaf && flagOf(node.leaf) && ['Breaks', flagOf(node.leaf).rules.join(', ')],
        ['Click', node.leaf ? 'to see how it is cut' : 'to look inside'],
      ]);
    });
    this.box.addEventListener('pointerleave', () => tip.hide());
    this.box.addEventListener('keydown', (event) => {
      const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      const tile = tileOf(event);
      if (moves[event.key] && tile) this.step(...moves[event.key]);
      else if ((event.key === 'Enter' || event.key === ' ') && tile) this.open(tile);
      else if ((event.key === 'Escape' || event.key === 'Backspace') && this.at.parent) { this.zoom(this.at.parent); this.tiles[0]?.focus({ preventScroll: true }); }
      else return;
      event.preventDefault();
    });
    this.choices();
    const redraw = () => { (function forget(node) { if (node.tallies) delete node.tallies.numbers; node.kids.forEach(forget); })(root); this.choices(); this.draw(); };
    onNumbers.push(redraw);
    onSide.push(redraw);
    new ResizeObserver(() => this.draw()).observe(this.box);
  },
  choices() {
    const choices = [
      ...(rolesFound.length > 1 ? [['role', 'Role']] : []), ['part', 'Part'], ['dtype', 'Type'],
      ...(numbers ? [['numbers', 'Numbers']] : []), ...(isCompared() ? [['change', 'Change']] : []),
    ];
    segmented($('colour-by'), choices, this.colourBy, (by) => { this.colourBy = by; this.draw(); });
  },
};

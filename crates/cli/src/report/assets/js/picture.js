// The picture of one tensor: its chunks as boxes over two of its dimensions, coloured by who holds them.

class Picture {
  constructor(tensor, places) {
    this.tensor = tensor; this.places = places;
    this.boxes = boxesOf(tensor.tiling);
    this.files = data.holders[tensor.holders];
    this.by = ranked ? 'rank' : 'file';
    this.over = -1; this.only = null;
    const { shape } = tensor;
    // Cuts of each dimension, to find the two worth showing and what to step through in the others.
    this.starts = shape.map((_, d) => [...new Set(this.boxes.map((box) => box.offsets[d]))].sort((a, b) => a - b));
    const order = shape.map((_, d) => d).sort((a, b) => this.starts[b].length - this.starts[a].length || shape[b] - shape[a] || a - b);
    [this.rowDim, this.colDim] = shape.length === 0 ? [-1, -1] : shape.length === 1 ? [-1, 0] : order.slice(0, 2).sort((a, b) => a - b);
    this.slice = shape.map(() => 0);

    this.canvas = el('canvas', { tabindex: 0, role: 'img', 'aria-label': this.describe() });
    this.said = el('p', { class: 'said mono', role: 'status', 'aria-live': 'polite' });
    this.controls = el('div', { class: 'picture-controls' });
    this.legend = el('div', { class: 'legend wrap' });
    this.node = el('div', { class: 'picture' }, this.controls, this.canvas, this.said, this.legend);
    this.canvas.addEventListener('pointermove', (event) => this.hover(event));
    this.canvas.addEventListener('pointerleave', () => { tip.hide(); this.say(-1); });
    this.canvas.addEventListener('keydown', (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.node);
    this.drawControls();
    this.drawLegend();
    this.say(-1);
  }

  describe() {
    return `How ${this.tensor.key} is cut: ${cutText(this.tensor)}. Arrow keys step through the chunks.`;
  }

  // What gets a colour: the rank or the file of a chunk, as a place among all ranks or files.
  group(chunk) {
    const file = this.files[chunk];
    return this.by === 'rank' ? rankPlace.get(data.files[file]?.rank) : file;
  }
  get groups() { return this.by === 'rank' ? ranks.length : data.files.length; }
  groupName(place) { return this.by === 'rank' ? `rank ${ranks[place]}` : data.files[place]?.path ?? 'unknown file'; }
  // Few holders of a tensor get hues of their own even where the checkpoint has many files.
  hue(place, forCanvas) {
    const used = this.used;
    const few = used.length <= HUES && this.groups > HUES;
    const [index, of] = few ? [used.indexOf(place), used.length] : [place, this.groups];
    return forCanvas ? inkColour(index, of) : hueOf(index, of);
  }
  get used() {
    this.usedBy ??= {};
    return this.usedBy[this.by] ??= [...new Set(this.boxes.map((_, i) => this.group(i)))].sort((a, b) => a - b);
  }

  drawControls() {
    const { shape } = this.tensor;
    const items = [];
    if (ranked && data.files.length > ranks.length) {
      const by = el('div', { class: 'segmented small', role: 'group', 'aria-label': 'Colour chunks by' });
      segmented(by, [['rank', 'Rank'], ['file', 'File']], this.by, (choice) => { this.by = choice; this.only = null; this.drawLegend(); this.draw(); });
      items.push(by);
    }
    if (shape.length > 2) {
      const dims = (label, chosen, set) => el('label', {}, label, el('select', {
        on: { change: (event) => { set(Number(event.target.value)); this.drawControls(); this.draw(); } },
      },
        ...shape.map((size, d) => el('option', { value: d, selected: d === chosen }, `dim ${d} (${size})`))));
      items.push(
        dims('down', this.rowDim, (d) => { if (d === this.colDim) this.colDim = this.rowDim; this.rowDim = d; }),
        dims('across', this.colDim, (d) => { if (d === this.rowDim) this.rowDim = this.colDim; this.colDim = d; }));
      shape.forEach((size, d) => {
        if (d === this.rowDim || d === this.colDim || this.starts[d].length < 2) return;
        const starts = this.starts[d];
        const now = el('output', {}, String(this.slice[d]));
        items.push(el('label', { class: 'slider' }, `dim ${d} at`, el('input', {
          type: 'range', min: 0, max: starts.length - 1, value: Math.max(0, starts.indexOf(this.slice[d])),
          on: { input: (event) => { this.slice[d] = starts[event.target.value]; now.textContent = this.slice[d]; this.draw(); } },
        }), now));
      });
    }
    this.controls.replaceChildren(...items);
    this.controls.hidden = !items.length;
  }

  drawLegend() {
    const used = this.used.filter((place) => place !== undefined);
    const held = new Map();
    const per = this.tensor.bytes / Math.max(1, volume(this.tensor.shape));
    this.boxes.forEach((box, i) => { const g = this.group(i); held.set(g, (held.get(g) ?? 0) + volume(box.sizes) * per); });
    if (used.length > 16) {
      this.legend.replaceChildren(el('span', { class: 'plain' }, this.groupName(used[0])),
        el('span', { class: 'ramp', css: { background: `linear-gradient(90deg, ${RAMP.map((c) => `rgb(${c.join(',')})`).join(', ')})` } }),
        el('span', { class: 'plain' }, this.groupName(used.at(-1))), el('span', { class: 'plain soft' }, plural(used.length, this.by)));
      return;
    }
    this.legend.replaceChildren(...used.map((place) => el('button', {
      type: 'button', css: { '--hue': this.hue(place) }, 'aria-pressed': String(this.only === place),
      on: {
        click: () => { this.only = this.only === place ? null : place; this.drawLegend(); this.draw(); },
        pointerenter: () => { this.lit = place; this.draw(); }, pointerleave: () => { this.lit = null; this.draw(); },
      },
    }, this.groupName(place), el('small', {}, bytes(held.get(place) ?? 0)))));
  }

  // The boxes of the chunks that the slice shows, in parts of the picture from 0 to 1.
  visible() {
    const { shape } = this.tensor;
    const span = (d, box) => {
      if (d < 0) return [0, 1];
      const size = shape[d] || 1;
      return [box.offsets[d] / size, (box.offsets[d] + box.sizes[d]) / size];
    };
    const list = [];
    this.boxes.forEach((box, i) => {
      for (let d = 0; d < shape.length; d += 1) {
        if (d === this.rowDim || d === this.colDim) continue;
        if (!(box.offsets[d] <= this.slice[d] && this.slice[d] < box.offsets[d] + box.sizes[d])) return;
      }
      const [x0, x1] = span(this.colDim, box);
      const [y0, y1] = span(this.rowDim, box);
      if (x1 > x0 && y1 > y0) list.push({ i, x0, x1, y0, y1 });
    });
    return list;
  }

  draw() {
    const { shape } = this.tensor;
    const wide = this.node.clientWidth;
    if (!wide) return;
    const left = this.rowDim < 0 ? 0 : 44; const top = shape.length ? 18 : 0;
    const w = wide - left;
    const ratio = this.rowDim < 0 ? 0 : shape[this.rowDim] / Math.max(1, shape[this.colDim]);
    const h = shape.length === 0 ? 64 : this.rowDim < 0 ? 84 : Math.min(Math.max(w * ratio, 110, 4 * this.starts[this.rowDim].length), 256);
    const dpr = devicePixelRatio || 1;
    const { canvas } = this;
    canvas.width = Math.round(wide * dpr); canvas.height = Math.round((h + top) * dpr);
    canvas.style.height = `${h + top}px`;
    const g = canvas.getContext('2d');
    g.setTransform(dpr, 0, 0, dpr, 0, 0);
    this.frame = { left, top, w, h };
    this.seen = this.visible();

    // What no chunk covers stays hatched.
    g.save();
    g.beginPath(); g.rect(left, top, w, h); g.clip();
    g.fillStyle = colour('var(--sunken)'); g.fillRect(left, top, w, h);
    g.strokeStyle = colour('var(--hatch)'); g.lineWidth = 1;
    g.beginPath();
    for (let x = left - h; x < left + w; x += 7) { g.moveTo(x, top + h); g.lineTo(x + h, top); }
    g.stroke();
    // Gaps between chunks, unless the thinnest would be lost in them.
    let thin = Infinity;
    for (const box of this.seen) thin = Math.min(thin, (box.x1 - box.x0) * w, (box.y1 - box.y0) * h);
    const gap = thin > 12 || (thin > 5 && this.seen.length < 40) ? 2 : thin > 3 ? 1 : 0;
    g.font = `600 11px ${getComputedStyle(document.body).fontFamily}`;
    g.textAlign = 'center'; g.textBaseline = 'middle';
    for (const box of this.seen) {
      // On whole pixels, so that thin neighbours do not blend; and never so thin as to vanish.
      const snap = (v) => Math.round(v * dpr) / dpr;
      const x = snap(left + box.x0 * w); const y = snap(top + box.y0 * h);
      const fullW = snap(left + box.x1 * w) - x; const fullH = snap(top + box.y1 * h) - y;
      const bw = Math.max(fullW - gap, 1 / dpr); const bh = Math.max(fullH - gap, 1 / dpr);
      const group = this.group(box.i);
      const dim = (this.only !== null && this.only !== group) || (this.lit !== null && this.lit !== undefined && this.lit !== group);
      const paint = group === undefined ? colour('var(--muted)') : this.hue(group, true);
      g.fillStyle = colour('var(--surface)');
      g.fillRect(x, y, fullW, fullH);
      // Without room for gaps, every second chunk is a little paler.
      g.globalAlpha = dim ? 0.16 : gap === 0 && box.i % 2 ? 0.8 : 1;
      g.fillStyle = paint;
      if (gap === 2) { g.beginPath(); g.roundRect(x, y, bw, bh, Math.min(3, bw / 2, bh / 2)); g.fill(); } else g.fillRect(x, y, bw, bh);
      if (bw > 44 && bh > 16 && group !== undefined) {
        const name = this.by === 'rank' ? `rank ${ranks[group]}` : `file ${group}`;
        g.fillStyle = dim ? colour('var(--ink)') : readableOn(paint);
        g.fillText(name, x + bw / 2, y + bh / 2 + 0.5);
      }
      g.globalAlpha = 1;
    }
    const lit = this.seen.find((box) => box.i === this.over);
    if (lit) {
      g.strokeStyle = colour('var(--ink)'); g.lineWidth = 2;
      g.strokeRect(left + lit.x0 * w + 1, top + lit.y0 * h + 1, Math.max((lit.x1 - lit.x0) * w - gap - 2, 1), Math.max((lit.y1 - lit.y0) * h - gap - 2, 1));
    }
    g.restore();
    this.ticks(g, this.frame);
  }

  // Cut positions along the two sides, as many as have room.
  ticks(g, { left, top, w, h }) {
    g.fillStyle = colour('var(--muted)');
    g.font = `10.5px ${getComputedStyle(document.body).fontFamily}`;
    const along = (d, length, need, last, put) => {
      if (d < 0) return;
      const size = this.tensor.shape[d];
      let clear = -Infinity;
      const end = length - last(size);
      for (const at of [...this.starts[d], size]) {
        const place = size ? (at / size) * length : 0;
        if (at !== size && (place < clear || place > end)) continue;
        put(at, place, at === size);
        clear = place + need(at);
      }
    };
    g.textBaseline = 'alphabetic';
    const width = (n) => String(n).length * 6.5 + 10;
    along(this.colDim, w, width, (n) => 2 * width(n), (at, x, last) => {
      g.textAlign = last ? 'right' : 'left';
      g.fillText(String(at), left + x, top - 6);
    });
    g.textAlign = 'right';
    along(this.rowDim, h, () => 16, () => 26, (at, y, last) => {
      g.textBaseline = last ? 'bottom' : 'top';
      g.fillText(String(at), left - 6, top + y + (last ? 1 : 0));
    });
  }

  say(chunk) {
    this.over = chunk;
    const box = this.boxes[chunk];
    this.said.textContent = box
      ? `${regionText(box)} · ${data.files[this.files[chunk]]?.path ?? 'unknown file'}`
      : this.boxes.length ? `${cutText(this.tensor)} · point at a chunk` : 'no chunk of this tensor is stored';
    this.draw();
  }

  facts(chunk) {
    const box = this.boxes[chunk];
    const file = data.files[this.files[chunk]];
    const per = this.tensor.bytes / Math.max(1, volume(this.tensor.shape));
    const place = this.places && this.places.length > 2 * chunk + 1 ? [this.places[2 * chunk], this.places[2 * chunk + 1]] : null;
    return [
      ['Offsets', box.offsets.length ? box.offsets.join(', ') : '–'], ['Sizes', shapeText(box.sizes)], ['Bytes', bytes(volume(box.sizes) * per)],
      ['File', file?.path ?? 'unknown'], file?.rank !== undefined && ['Rank', String(file.rank)],
      place && ['In file', `at ${count(place[0])}, ${bytes(place[1])}`],
    ];
  }

  hover(event) {
    const { left, top, w, h } = this.frame;
    const area = this.canvas.getBoundingClientRect();
    const x = (event.clientX - area.left - left) / w; const y = (event.clientY - area.top - top) / h;
    const hit = this.seen.findLast((box) => x >= box.x0 && x < box.x1 && y >= box.y0 && y < box.y1);
    if (!hit) { tip.hide(); if (this.over >= 0) this.say(-1); return; }
    if (hit.i !== this.over) this.say(hit.i);
    tip.show(event.clientX, event.clientY, `Chunk ${hit.i + 1} of ${count(this.boxes.length)}`, this.facts(hit.i));
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || !this.seen?.length) return;
    event.preventDefault();
    const now = this.seen.findIndex((box) => box.i === this.over);
    const next = this.seen[(now + step + this.seen.length) % this.seen.length] ?? this.seen[0];
    this.say(next.i);
    const area = this.canvas.getBoundingClientRect();
    const { left, top, w, h } = this.frame;
    tip.show(area.left + left + next.x1 * w, area.top + top + next.y1 * h, `Chunk ${next.i + 1} of ${count(this.boxes.length)}`, this.facts(next.i));
  }
}

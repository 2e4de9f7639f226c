// A table that draws only the rows in view, so that ten thousand cost what thirty do. Keyboard and reader support follow the
// ARIA grid pattern: one tab stop, the active row named by aria-activedescendant.

const ROW = 34;
class Rows {
  // columns: [{ id, title, sortable, className, cell(item, cellNode) }]
  constructor(box, { label, columns, choose, sort, nothing = () => 'Nothing matches.' }) {
    this.box = box; this.columns = columns; this.choose = choose; this.sort = sort; this.nothing = nothing;
    this.items = []; this.chosen = -1; this.drawn = new Map(); this.spare = [];
    this.prefix = `${box.id}-row-`;
    this.head = el('div', { class: 'row head', role: 'row', 'aria-rowindex': 1 }, ...columns.map((column) => {
      const name = column.sortable
        ? el('button', { type: 'button', tabindex: -1, on: { click: () => sort(column.id) } }, column.title, el('i', { 'aria-hidden': 'true' }))
        : column.title;
      return el('div', { role: 'columnheader', class: column.className, 'data-column': column.id }, name);
    }));
    this.body = el('div', { class: 'body', role: 'rowgroup' });
    this.none = el('p', { class: 'empty', hidden: true });
    box.replaceChildren();
    fill(box, { role: 'grid', tabindex: 0, 'aria-label': label, 'aria-colcount': columns.length },
      [el('div', { role: 'rowgroup', class: 'head-group' }, this.head), this.body, this.none]);
    for (const button of this.head.querySelectorAll('button')) button.tabIndex = 0;
    // A box may be given other columns later: it listens once, for whoever has it then.
    if (!box.rows) {
      box.addEventListener('scroll', () => box.rows.draw(), { passive: true });
      new ResizeObserver(() => box.rows.draw()).observe(box);
      box.addEventListener('keydown', (event) => box.rows.key(event));
    }
    box.rows = this;
    this.body.addEventListener('click', (event) => {
      const row = event.target.closest('.row');
      if (row) this.go(row.index, true, true);
    });
  }

  sorted(id, descending) {
    for (const cell of this.head.children) {
      const on = cell.dataset.column === id;
      if (on) cell.setAttribute('aria-sort', descending ? 'descending' : 'ascending'); else cell.removeAttribute('aria-sort');
    }
  }

  set(items, chosen = -1) {
    this.items = items;
    this.chosen = chosen;
    this.box.setAttribute('aria-rowcount', items.length + 1);
    this.body.style.height = `${items.length * ROW}px`;
    this.none.hidden = items.length > 0;
    this.none.replaceChildren(...(items.length ? [] : [this.nothing()].flat()));
    for (const row of this.drawn.values()) { row.remove(); this.spare.push(row); }
    this.drawn.clear();
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW) - 6);
    const last = Math.min(this.items.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / ROW) + 6);
    for (const [index, row] of this.drawn) {
      if (index < first || index >= last) { row.remove(); this.spare.push(row); this.drawn.delete(index); }
    }
    for (let index = first; index < last; index += 1) {
      if (this.drawn.has(index)) continue;
      const row = this.spare.pop() ?? el('div', { class: 'row', role: 'row' }, ...this.columns.map((column) => el('div', { role: 'gridcell', class: column.className })));
      row.index = index;
      row.id = this.prefix + index;
      row.setAttribute('aria-rowindex', index + 2);
      row.style.transform = `translateY(${index * ROW}px)`;
      this.columns.forEach((column, i) => { row.children[i].replaceChildren(); column.cell(this.items[index], row.children[i]); });
      this.drawn.set(index, row);
      this.body.append(row);
    }
    for (const [index, row] of this.drawn) row.setAttribute('aria-selected', String(index === this.chosen));
    if (this.drawn.has(this.chosen)) this.box.setAttribute('aria-activedescendant', this.prefix + this.chosen);
    else this.box.removeAttribute('aria-activedescendant');
  }

  go(index, tell, byPointer = false) {
    if (!this.items.length) return;
    this.chosen = Math.min(Math.max(index, 0), this.items.length - 1);
    const top = this.chosen * ROW;
    const room = this.box.clientHeight - ROW;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + ROW > this.box.scrollTop + room) this.box.scrollTop = top + ROW - room;
    this.draw();
    if (tell) this.choose(this.items[this.chosen], byPointer);
  }

  key(event) {
    if (event.target !== this.box) return;
    const page = Math.max(1, Math.floor(this.box.clientHeight / ROW) - 2);
    const to = {
      ArrowDown: this.chosen + 1, ArrowUp: this.chosen - 1, PageDown: this.chosen + page, PageUp: this.chosen - page,
      Home: 0, End: this.items.length - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.go(to, true);
  }
}

// The verdict and what it rests on; findings; the scan that a server runs behind the page.

const WORD = {
  healthy: ['Healthy', 'm3.5 8.5 3 3 6-7'], partial: ['Fine so far', 'm3.5 8.5 3 3 6-7'], warning: ['Worth a look', 'M8 3.5v5.5M8 12v.5'],
  unwell: ['Bad numbers', 'M8 3.5v5.5M8 12v.5'], damaged: ['Damaged', 'm4.5 4.5 7 7m0-7-7 7'], unchecked: ['Not checked', 'M4 8h8'],
};
const CHECK = {
  fine: ['m3.5 8.5 3 3 6-7', 'fine'], warning: ['M8 3.5v5.5M8 12v.5', 'worth a look'], bad: ['m4.5 4.5 7 7m0-7-7 7', 'bad'],
  unchecked: ['M4.5 8h7', 'not checked'], running: ['M8 4v4l3 2', 'being checked'],
};
const icon = (d) => svg('svg', { viewBox: '0 0 16 16', 'aria-hidden': 'true' }, svg('path', { d }));

function checkItem(name, { state, note }) {
  const [mark, says] = CHECK[state];
  return el('li', { 'data-check': name, 'data-state': state }, icon(mark),
    el('span', {}, el('b', {}, name), ' ', el('span', { class: 'note' }, note || says), el('span', { class: 'visually-hidden' }, ` (${says})`)));
}

function verdict(health) {
  const [word, path] = WORD[health.state];
  const checks = ['structure', 'checksums', 'numbers'].map((name) => checkItem(name, health.checks[name]));
  fill($('health'), { 'data-state': health.state }, []);
  $('health').replaceChildren(el('p', { class: 'pill' }, icon(path), word), el('ul', { class: 'checks', 'aria-label': 'What was checked' }, ...checks));

  const findings = health.findings ?? [];
  if (!findings.length) { $('findings').replaceChildren(); return; }
  const rows = findings.slice(0, 500).map((finding) => {
    const tensor = finding.key !== undefined && byKey.get(finding.key);
    return el('li', { class: finding.bad ? 'bad' : undefined }, el('span', {}, finding.text), el('span', { class: 'mono soft' },
      tensor ? el('button', { type: 'button', class: 'link', on: { click: () => show(tensor, true) } }, finding.key) : finding.key,
      finding.file !== undefined && ` ${finding.file}${finding.offset === undefined ? '' : ` at ${count(finding.offset)}`}`));
  });
  const hidden = Math.max(health.found ?? 0, findings.length) - rows.length;
  if (hidden > 0) rows.push(el('li', { class: 'soft' }, `and ${count(hidden)} more; reshard stats --all lists them`));
  $('findings').replaceChildren(el('details', { class: 'findings', 'data-state': health.state, open: findings.length <= 4 },
    el('summary', {}, plural(Math.max(health.found ?? 0, findings.length), 'finding')), el('ul', {}, ...rows)));
}

// The scan: asked about now and then, and shown when it is there.
const scan = {
  async ask() {
    let answer;
    try {
      answer = await (await fetch('/api/numbers')).json();
    } catch {
      $('scan').replaceChildren(el('p', { class: 'soft' }, 'The server does not answer any more; the numbers are not here.'));
      return;
    }
    if (answer.state === 'running') {
      this.show(answer.done, answer.total);
      setTimeout(() => this.ask(), 400);
    } else if (answer.state === 'done') {
      $('scan').replaceChildren();
      numbers = answer.numbers;
      verdict(answer.health);
      for (const redraw of onNumbers) redraw();
    }
  },
  show(done, total) {
    const part = total ? done / total : 0;
    $('numbers').hidden = false;
    $('scan').replaceChildren(
      el('div', { class: 'progress', role: 'progressbar', 'aria-label': 'Reading numbers', 'aria-valuenow': Math.round(100 * part), 'aria-valuemin': 0, 'aria-valuemax': 100 },
        el('i', { css: { '--part': String(part) } })),
      el('p', { class: 'soft' }, total ? `Reading every number: ${bytes(done)} of ${bytes(total)}` : 'Reading every number…'));
  },
  start() {
    if (!data.live || data.checkpoint.health.checks.numbers.state !== 'running') return;
    this.show(0, 0);
    this.ask();
  },
};

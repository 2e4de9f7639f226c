// The verdicts and what they rest on; findings; the scan that a server runs behind the page.

const WORD = {
  healthy: ['Healthy', 'm3.5 8.5 3 3 6-7'], partial: ['Fine so far', 'm3.5 8.5 3 3 6-7'], warning: ['Worth a look', 'M8 3.5v5.5M8 12v.5'],
  unwell: ['Bad numbers', 'M8 3.5v5.5M8 12v.5'], damaged: ['Damaged', 'm4.5 4.5 7 7m0-7-7 7'], unchecked: ['Not checked', 'M4 8h8'],
};
const CHECK = {
  fine: ['m3.5 8.5 3 3 6-7', 'fine'], warning: ['M8 3.5v5.5M8 12v.5', 'worth a look'], bad: ['m4.5 4.5 7 7m0-7-7 7', 'bad'],
  partial: ['m3.5 8.5 3 3 6-7', 'fine so far'], unchecked: ['M4.5 8h7', 'not checked'], running: ['M8 4v4l3 2', 'being checked'],
};
let { health } = data.checkpoint;
let otherHealth = data.other_health;
const icon = (d) => svg('svg', { viewBox: '0 0 16 16', 'aria-hidden': 'true' }, svg('path', { d }));

function checkItem(name, { state, note }) {
  const [mark, says] = CHECK[state];
  return el('li', { 'data-check': name, 'data-state': state }, icon(mark),
    el('span', {}, el('b', {}, name), ' ', el('span', { class: 'note' }, note || says), el('span', { class: 'visually-hidden' }, ` (${says})`)));
}

const checkList = (health, label) => el('ul', { class: 'checks', 'aria-label': label }, ...['structure', 'checksums', 'numbers'].map((name) => checkItem(name, health.checks[name])));

// Verdicts, the gravest last: of two checkpoints the page is headed by the graver one's.
const GRAVITY = ['healthy', 'partial', 'unchecked', 'warning', 'unwell', 'damaged'];
function verdict(health, other) {
  const gravity = ({ state }) => GRAVITY.indexOf(state);
  const graver = other && gravity(other) > gravity(health) ? other : health;
  const whose = !other ? null : other.state === health.state ? 'both' : graver === other ? nameB : nameA;
  const [word, path] = WORD[graver.state];
  fill($('health'), { 'data-state': graver.state }, []);
  $('health').replaceChildren(
    el('p', { class: 'pill' }, icon(path), word, whose !== null && el('span', { class: 'whose' }, whose)),
    // Of two that are alike each has its checks beside its name, where they are compared.
    checkList(graver, whose === null || whose === 'both' ? 'What was checked' : `What was checked of ${whose}`));
  $('findings').replaceChildren(...findingsOf(health, other, graver.state));
}

// A finding about a parameter names it as its optimizer does: the one weight whose key ends so is meant.
function tensorOf(key) {
  if (byKey.has(key)) return byKey.get(key);
  const some = tensors.filter((tensor) => tensor.key.endsWith(`.${key}`) && !isState(tensor));
  return some.length === 1 ? some[0] : undefined;
}

// What was found, the gravest first: a few at once, the rest on demand.
const FIRST_FINDINGS = 4;
function findingsOf(health, other, state) {
  const all = [[health, nameA], ...(other ? [[other, nameB]] : [])].flatMap(([of, whose]) => (of.findings ?? []).map((finding) => ({ finding, whose })));
  if (!all.length) return [];
  // What is not finite makes everything else so: it stands before what is merely too large.
  const grave = ({ finding }) => (finding.bad ? 2 : 0) + (FINITE_RULES.includes(finding.rule) ? 1 : 0);
  all.sort((a, b) => grave(b) - grave(a));
  const rows = all.slice(0, 500).map(({ finding, whose }) => {
    const tensor = finding.key !== undefined && tensorOf(finding.key);
    return el('li', { class: finding.bad ? 'bad' : undefined }, el('span', {}, finding.text), other && el('span', { class: 'whose' }, `in ${whose}`), el('span', { class: 'mono soft' },
      tensor ? el('button', { type: 'button', class: 'link', on: { click: () => show(tensor, true) } }, named(finding.key)) : finding.key,
      finding.file !== undefined && ` ${finding.file}${finding.offset === undefined ? '' : ` at ${count(finding.offset)}`}`));
  });
  const found = [health, other].reduce((sum, of) => sum + Math.max(of?.found ?? 0, of?.findings?.length ?? 0), 0);
  const hidden = found - rows.length;
  if (hidden > 0) rows.push(el('li', { class: 'soft' }, `and ${count(hidden)} more; reshard stats --all lists them`));
  const rest = rows.slice(FIRST_FINDINGS);
  return [el('div', { class: 'findings', 'data-state': state }, el('h2', { class: 'findings-title' }, plural(found, 'finding')), el('ul', {}, ...rows.slice(0, FIRST_FINDINGS)),
    rest.length > 0 && el('details', {}, el('summary', {}, `${count(found - FIRST_FINDINGS)} more`), el('ul', {}, ...rest)))];
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
      numbers = answer.numbers ?? null;
      takeSide(side);
      Object.assign(data, { comparing: false, diff: answer.diff ?? data.diff, not_compared: answer.not_compared });
      noteChanges();
      otherHealth = answer.other_health ?? otherHealth;
      health = answer.health;
      verdict(health, otherHealth);
      for (const redraw of onNumbers) redraw();
    }
  },
  show(done, total) {
    const part = total ? done / total : 0;
    $('numbers').hidden = health.checks.numbers.state !== 'running';
    $('scan').replaceChildren(
      el('div', { class: 'progress', role: 'progressbar', 'aria-label': 'Reading numbers', 'aria-valuenow': Math.round(100 * part), 'aria-valuemin': 0, 'aria-valuemax': 100 },
        el('i', { css: { '--part': String(part) } })),
      el('p', { class: 'soft' }, total ? `Reading every number: ${bytes(done)} of ${bytes(total)}` : 'Reading every number…'));
  },
  start() {
    if (!data.live || !(data.comparing || health.checks.numbers.state === 'running')) return;
    this.show(0, 0);
    this.ask();
  },
};

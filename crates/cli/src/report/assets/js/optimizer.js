// The optimizer: slots with their numbers, groups at a glance, how large the next update will be.

// Numbers of one slot over all parameters.
function slotNumbers(name) {
  const sum = { tensors: 0, bad: 0, zero: 0, negative: 0, low: Infinity, high: -Infinity, rules: [] };
  for (const tensor of tensors) {
    if (!isState(tensor) || !tensor.key.endsWith(`.${name}`)) continue;
    const stats = statsOf(tensor);
    if (!stats) continue;
    sum.tensors += 1;
    if (badCount(stats)) sum.bad += 1;
    if (stats.count && stats.zeros === stats.count) sum.zero += 1;
    if (stats.rms !== undefined && stats.rms > 0) { sum.low = Math.min(sum.low, stats.rms); sum.high = Math.max(sum.high, stats.rms); }
    for (const rule of flagOf(tensor)?.rules ?? []) sum.rules.push(rule);
  }
  return sum;
}

// Whether parameters have numbers for names, as `torch.optim` gives them.
const isNumbered = () => tensors.some((tensor) => isState(tensor) && /^\d+\.[^.]+$/.test(tensor.key.slice(stateRoot.length)));

// Update ratios by size: a bar for each third of a decade, and the largest by name.
function updatesChart() {
  const ratios = Object.entries(shown.updates ?? {}).map(([i, ratio]) => [tensors[i], ratio]).filter(([, ratio]) => ratio > 0);
  if (!ratios.length) return null;
  const W = 400; const H = 96; const BASE = 76;
  const place = (ratio) => Math.floor(3 * Math.log10(ratio));
  const low = Math.min(-12, ...ratios.map(([, ratio]) => place(ratio))); const high = Math.max(0, ...ratios.map(([, ratio]) => place(ratio) + 1));
  const counts = new Array(high - low).fill(0);
  for (const [, ratio] of ratios) counts[place(ratio) - low] += 1;
  // The rule alone says what is large: its limit can be set, and it does not judge biases.
  const hot = new Set(ratios.filter(([tensor]) => breaks(tensor, 'large-update')).map(([, ratio]) => place(ratio) - low));
  const most = Math.max(...counts, 1); const step = W / counts.length;
  const chart = svg('svg', { viewBox: `0 0 ${W} ${H}`, role: 'img', 'aria-label': `Next update over weights of ${plural(ratios.length, 'parameter')}` });
  counts.forEach((n, i) => {
    if (n) chart.append(svg('rect', { class: hot.has(i) ? 'bin hot' : 'bin', x: i * step + 1, y: BASE - Math.max(2, (n / most) * (BASE - 6)), width: Math.max(step - 2, 1), height: Math.max(2, (n / most) * (BASE - 6)) }));
    chart.append(svg('rect', { class: 'catch', x: i * step, y: 0, width: step, height: BASE, on: {
      pointermove: (event) => tip.show(event.clientX, event.clientY, plural(n, 'parameter'), [['From', number(10 ** ((low + i) / 3))], ['To', number(10 ** ((low + i + 1) / 3))]]),
      pointerleave: () => tip.hide(),
    } }));
  });
  chart.append(svg('line', { x1: 0, x2: W, y1: BASE, y2: BASE, class: 'axis' }));
  for (let e = Math.ceil(low / 3); e <= high / 3; e += 1) {
    const x = (3 * e - low) * step;
    if ((high - low) / 3 <= 8 || e % 2 === 0) chart.append(svg('line', { x1: x, x2: x, y1: BASE, y2: BASE + 4, class: 'axis' }), svg('text', { x, y: H - 4, 'text-anchor': x < 12 ? 'start' : x > W - 12 ? 'end' : 'middle' }, number(10 ** e)));
  }
  ratios.sort((a, b) => b[1] - a[1]);
  const link = ([tensor, ratio]) => el('li', {}, el('button', { type: 'button', class: 'link mono', on: { click: () => show(tensor, true) } }, tensor.key), el('span', { class: breaks(tensor, 'large-update') ? 'alarm' : 'soft' }, number(ratio)));
  return el('div', { class: 'updates' }, el('h3', { class: 'sub' }, 'Next update over weights, estimated from the moments'),
    el('figure', { class: 'histogram' }, chart), el('ul', { class: 'ranking', 'aria-label': 'Largest updates' }, ...ratios.slice(0, 5).map(link)));
}

function optimizerSection() {
  // Of two checkpoints the one that is shown, unless only the other has an optimizer.
  const whose = shown.optimizer ? shown : SIDES[side === 'a' ? 'b' : 'a']();
  const { optimizer } = whose;
  if (!optimizer) return;
  const judged = Boolean(numbers && whose === shown && stateRoot !== null);
  const sizeOf = (group) => group.slots.reduce((sum, slot) => sum + slot.bytes, 0);
  const names = [...new Set(optimizer.groups.flatMap((group) => group.slots.map((slot) => slot.name)))];
  const hue = (name) => hueOf(names.indexOf(name) % HUES, Math.min(names.length, HUES));
  const totalOf = (name, of) => optimizer.groups.reduce((sum, group) => sum + (group.slots.find((slot) => slot.name === name)?.[of] ?? 0), 0);
  // Where groups do not name their parameters, each shows the slots of all: count them once.
  const shared = optimizer.groups.length > 1 && optimizer.groups.every((group) => JSON.stringify(group.slots) === JSON.stringify(optimizer.groups[0].slots));
  const times = shared ? optimizer.groups.length : 1;
  const narrow = (name) => {
    list.only({ scope: { kind: 'set', label: `slot ${name}`, set: new Set(tensors.filter((tensor) => isState(tensor) && tensor.key.endsWith(`.${name}`)).map((tensor) => tensor.i)) } });
    $('tensors').scrollIntoView({ behavior: calm.matches ? 'auto' : 'smooth', block: 'start' });
  };
  const columns = [['Slot'], ['Type'], ['Tensors', 'num'], ['Bytes', 'num'], ...(judged ? [['NaN, Inf', 'num'], ['All zero', 'num'], ['RMS', 'num']] : [])];
  const slotRow = (name) => {
    const dtypes = [...new Set(optimizer.groups.flatMap((group) => group.slots.filter((slot) => slot.name === name).flatMap((slot) => slot.dtypes)))];
    const found = judged && slotNumbers(name);
    const alarm = (n, kind) => el('span', { class: n ? kind : 'nothing' }, count(n));
    return [
      [swatch(hue(name)), el('button', { type: 'button', class: 'link', on: { click: () => narrow(name) } }, name)], dtypes.join(', '),
      count(totalOf(name, 'tensors') / times), bytes(totalOf(name, 'bytes') / times),
      ...(found ? [alarm(found.bad, breach([found], FINITE_RULES) ? 'alarm' : ''), alarm(found.zero, found.rules.includes('dead-parameter') ? 'caution' : ''), found.low <= found.high ? (found.low === found.high ? number(found.low) : `${number(found.low)} – ${number(found.high)}`) : '–'] : []),
    ];
  };
  // Groups at a glance: what they differ in first.
  const options = [...new Set(optimizer.groups.flatMap((group) => group.options.map(([name]) => name)))];
  const value = (group, option) => group.options.find(([name]) => name === option)?.[1] ?? '–';
  const differ = (option) => new Set(optimizer.groups.map((group) => value(group, option))).size > 1;
  const rank = (option) => (differ(option) ? 0 : 10) + (['lr', 'weight_decay'].indexOf(option) + 1 || 5);
  options.sort((a, b) => rank(a) - rank(b));
  const groups = el('div', { class: 'scroll', tabindex: 0, role: 'group', 'aria-label': 'Param groups' },
    plainTable([['Group'], ['Parameters', 'num'], ...options.map((option) => [option, 'num'])],
      optimizer.groups.map((group) => [`Group ${group.name}`, count(group.params), ...options.map((option) => el('span', { class: differ(option) ? 'mono differs' : 'mono' }, value(group, option)))])));
  $('optimizer').hidden = false;
  $('optimizer').replaceChildren(
    el('div', { class: 'card-head' }, el('h2', { id: 'optimizer-title' }, 'Optimizer', whoseCard(whose.name)), ...(data.diff ? [sideSwitch()] : []),
      el('p', { class: 'soft' }, [optimizer.name, plural(optimizer.groups.length, 'param group'), bytes(optimizer.groups.reduce((sum, group) => sum + sizeOf(group), 0) / times)].filter(Boolean).join(' · '))),
    stack(names.map((name) => ({ hue: hue(name), size: totalOf(name, 'bytes') }))),
    el('div', { class: 'group-body' },
      el('div', {}, el('div', { class: 'scroll', tabindex: 0, role: 'group', 'aria-label': 'Slots' }, plainTable(columns, names.map(slotRow))), el('h3', { class: 'sub' }, 'Param groups'), groups),
      updatesChart() ?? el('p', { class: 'soft' }, whose !== shown ? `${shown.name} has no optimizer state.` : numbers ? (isNumbered() ? 'Its parameters are numbered, not named: nobody knows which weight each belongs to, so no update can be told.' : 'No moments from which an update could be told.') : 'How large the next update is can be told once the numbers are read.')));
}
onNumbers.push(optimizerSection);
onSide.push(optimizerSection);

// The panel beside the table: everything about the chosen tensor. Live, its values are asked for on a click.

const loaded = new Map();
let chosen = null;
let picture = null;

async function askForValues(tensor, box) {
  box.replaceChildren(el('p', { class: 'soft loading', role: 'status' }, 'Reading…'));
  try {
    const answer = await fetch(`/api/tensor?key=${encodeURIComponent(tensor.key)}`);
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.error ?? `The server said ${answer.status}.`);
    loaded.set(tensor.i, body);
    if (chosen === tensor) detail(tensor);
  } catch (error) {
    if (chosen !== tensor) return;
    const lost = error instanceof TypeError;
    box.replaceChildren(
      el('p', { class: 'alarm', role: 'alert' }, lost ? 'The server does not answer. Is “reshard serve” still running?' : error.message),
      el('button', { type: 'button', class: 'primary', on: { click: () => askForValues(tensor, box) } }, 'Try again'));
  }
}

function valuesOf(tensor) {
  const more = loaded.get(tensor.i);
  const [first, other] = [more?.stats ?? firstStatsOf(tensor), otherStatsOf(tensor)];
  const both = [{ stats: first, flag: firstFlagOf(tensor), name: nameA }, { stats: other, flag: otherFlagOf(tensor), name: nameB }];
  // Those that are shown everywhere stand first; the other's beside them.
  const [ours, theirs] = side === 'b' && other ? both.reverse() : both;
  const box = el('div', { id: 'values', class: 'values' });
  for (const [flag, whose] of [[firstFlagOf(tensor), nameA], [otherFlagOf(tensor), nameB]]) {
    if (flag) box.append(el('p', { class: flag.bad ? 'rule alarm' : 'rule caution' }, `Breaks ${flag.rules.join(', ')}${data.diff ? ` (in ${whose})` : ''}`));
  }
  if (ours.stats) {
    const shape = first ? distribution(first, other) : distribution(other);
    if (shape) box.append(shape);
    else if (hasShape(ours.stats)) box.append(el('p', { class: 'soft note' }, `Its distribution is not on this page, which has room for those that break rules and the largest${data.live ? '; its values can be loaded' : ''}.`));
    box.append(statistics(ours, theirs));
    const update = updateOf(tensor);
    if (update !== undefined) box.append(el('p', { class: 'soft note' }, `Next update, estimated from the moments: ${number(update)} of the weights`));
  }
  if (more?.sample) box.append(sampleTable(more.sample));
  if (more?.text) box.append(el('pre', {}, more.text));
  if (data.live && !more) {
    box.append(el('button', { type: 'button', class: 'primary', id: 'load', on: { click: () => askForValues(tensor, box) } }, 'Load values'));
  }
  return box.childNodes.length ? [el('h4', {}, data.diff && ours.stats ? `Values in ${ours.name}` : 'Values'), box] : [];
}

function changeOf(tensor) {
  if (!isCompared()) return [];
  const what = change.get(tensor.i);
  const box = el('dl', { class: 'stats' });
  const item = (label, text) => text !== undefined && text !== null && box.append(el('div', {}, el('dt', {}, label), el('dd', {}, text)));
  if (what === undefined) {
    const verdict = data.diff.values_compared ? 'The same, value by value.' : 'The same type and shape; values were not compared.';
    return [el('h4', {}, `Compared with ${nameB}`), el('p', { class: 'verdict' }, verdict)];
  }
  if (what === 'only_a') return [el('h4', {}, `Compared with ${nameB}`), el('p', { class: 'verdict only-a' }, `${nameB} does not have it.`)];
  if (what.newly_bad) item(`new NaN, Inf`, count(what.newly_bad));
  if (what.newly_zero) item('now', 'all zero');
  item('type there', what.dtype);
  item('shape there', what.shape && shapeText(what.shape));
  const sizes = [['moved', '‖Δw‖ / ‖w‖'], ['cosine', 'cosine'], ['max_abs', 'max |Δ|'], ['mean_abs', 'mean |Δ|'], ['max_rel', 'max rel Δ'], ['mean_rel', 'mean rel Δ']];
  for (const [field, label] of sizes) if (field in what) item(label, changeText(what, field));
  item('first at', what.first && `[${what.first.join(', ')}]`);
  return [el('h4', {}, `Compared with ${nameB}`), box];
}

function detail(tensor) {
  chosen = tensor;
  picture = new Picture(tensor, loaded.get(tensor.i)?.places ?? data.places?.[tensor.i]);
  const copy = el('button', {
    type: 'button', class: 'quiet copy', 'aria-label': 'Copy the key',
    on: {
      async click() {
        try { await navigator.clipboard.writeText(tensor.key); copy.textContent = 'Copied'; } catch { copy.textContent = 'Not allowed'; }
        setTimeout(() => { copy.textContent = 'Copy'; }, 1500);
      },
    },
  }, 'Copy');
  const fact = (label, text) => el('div', {}, el('dt', {}, label), el('dd', {}, text));
  const cut = tensor.key.lastIndexOf('.');
  // Long names break at their dots.
  const path = tensor.key.slice(0, cut + 1).split(/(?<=\.)/, 200).flatMap((part) => [el('span', { class: 'soft' }, part), el('wbr')]);
  const name = el('h3', { class: 'key-name' }, ...path, cut < 0 ? named(tensor.key) : tensor.key.slice(cut + 1));
  $('detail').replaceChildren(
    el('div', { class: 'detail-head' }, name, copy),
    el('dl', { class: 'facts-grid' },
      fact('Type', tensor.dtypeName), fact('Shape', shapeText(tensor.shape)), fact('Bytes', bytes(tensor.bytes)),
      fact('Elements', count(volume(tensor.shape))), fact('Chunks', count(tensor.chunks)), fact('Role', ROLES.find(([id]) => id === tensor.role)[1])),
    ...(firstFlagOf(tensor) || data.diff ? [...valuesOf(tensor), ...changeOf(tensor), el('h4', {}, 'Chunks'), picture.node] : [el('h4', {}, 'Chunks'), picture.node, ...valuesOf(tensor)]));
  picture.draw();
}

function nothingChosen() {
  $('detail').replaceChildren(el('p', { class: 'empty' }, 'Choose a tensor to see how it is cut and who holds each piece.'));
}

// Chooses a tensor from anywhere on the page.
function show(tensor, jump) {
  detail(tensor);
  list.reveal(tensor);
  try { history.replaceState(null, '', `#key=${encodeURIComponent(tensor.key)}`); } catch { /* refused to some files opened from disk */ }
  if (jump) $('tensors').scrollIntoView({ behavior: calm.matches ? 'auto' : 'smooth', block: 'start' });
}
redraws.push(() => picture?.draw());
const detailAgain = () => { if (chosen) detail(chosen); };
onNumbers.push(detailAgain);
onSide.push(detailAgain);

// Puts the page together.

theme.set(theme.remembered(), false);
$('theme').addEventListener('click', () => theme.set(theme.now === 'dark' ? 'light' : 'dark', true));
dark.addEventListener('change', () => theme.set(null, false));

if (data.live) $('made').textContent = 'Made by reshard. This page asks only the server that shows it, on this machine; it sends nothing anywhere else.';
summary();
if (data.diff) for (const id of ['modules', 'files', 'dtypes', 'tensors']) $(`${id}-title`).append(whoseCard());
// Without tensors there is nothing to list or to map.
for (const id of ['tensors', 'modules']) $(id).hidden = !tensors.length;
list.start();
treemap.start();
holdersChart.start();
sharesCharts();
diffSection();
optimizerSection();
plainSection();
numbersSection();
fillSides();
scan.start();
$('nav').replaceChildren(...[['diff', 'Changes'], ['numbers', 'Numbers'], ['modules', 'Modules'], ['files', 'Files'], ['tensors', 'Tensors'], ['optimizer', 'Optimizer'], ['plain', 'Values']]
  .filter(([id]) => !$(id).hidden).map(([id, text]) => el('a', { href: `#${id}` }, text)));

// A link may name a tensor; else the largest is shown, so that the panel is never empty.
let wanted = null;
try { wanted = location.hash.startsWith('#key=') ? byKey.get(decodeURIComponent(location.hash.slice(5))) : null; } catch { /* not a key */ }
if (wanted) show(wanted, true);
else if (list.items.length) { detail(list.items[0]); list.reveal(list.items[0]); } else nothingChosen();
document.documentElement.dataset.ready = performance.now().toFixed(0);

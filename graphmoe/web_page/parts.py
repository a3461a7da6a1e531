"""The style and the script of `graphmoe.web_page.page`."""

from __future__ import annotations

STYLE = """
:root { --text: #1c2430; --soft: #5b6675; --back: #f6f7f9; --box: #ffffff; --line: #dfe3e8; --link: #1f5fae; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e9ee; --soft: #9aa5b3; --back: #12161c; --box: #1b2129; --line: #323b47;
    --link: #7db4f5; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem clamp(.7rem, 2vw, 2rem) 3rem; max-width: 1800px; color: var(--text);
  background: var(--back); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
p, h1, dd, figcaption { overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: .2rem 0; }
h2 { font-size: 1.25rem; margin: 2rem 0 .6rem; scroll-margin-top: 3.2rem; }
section { scroll-margin-top: 3.2rem; }
a { color: var(--link); }
nav { position: sticky; top: 0; z-index: 2; display: flex; gap: 1rem; overflow-x: auto; padding: .55rem 0;
  background: var(--back); border-bottom: 1px solid var(--line); white-space: nowrap; }
code { background: var(--line); padding: .1em .35em; border-radius: 4px; overflow-wrap: anywhere;
  font: .9em ui-monospace, Menlo, Consolas, monospace; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .6rem;
  margin: 1rem 0; }
.tiles > div, figure, details { background: var(--box); border: 1px solid var(--line); border-radius: 8px; }
.tiles > div { padding: .5rem .8rem; min-width: 0; }
.tiles dt, .tiles .remark, .note, caption { color: var(--soft); font-size: .85rem; }
.tiles dd { margin: 0; font-size: 1.25rem; font-weight: 600; }
.tiles dd.remark { font-weight: 400; font-size: .8rem; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: .8rem; }
.grid .wide { grid-column: 1 / -1; }
figure { margin: 0; padding: .5rem .6rem; min-width: 0; }
figcaption { font-weight: 600; }
.note { margin: .2rem 0 0; }
.scroll { overflow-x: auto; max-width: 100%; }
.slider { display: flex; gap: .7rem; align-items: center; font-size: .9rem; flex-wrap: wrap; }
.slider output { min-width: 4em; font-variant-numeric: tabular-nums; }
.slider input { flex: 1 1 12rem; min-width: 0; height: 2rem; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; font-size: .92rem; }
caption { text-align: left; padding-bottom: .2rem; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .9rem .3rem 0; text-align: left;
  vertical-align: top;
  max-width: 46rem; overflow-wrap: break-word; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
.number { text-align: right; white-space: nowrap; }
.folds { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: .5rem;
  align-items: start; }
.side { display: flex; flex-wrap: wrap; gap: 0 3rem; align-items: start; }
.side > * { min-width: 0; }
details { padding: .3rem .8rem; min-width: 0; }
summary { cursor: pointer; padding: .2rem 0; font-weight: 600; }
"""

SCRIPT = """
(() => {
  const dark = window.matchMedia('(prefers-color-scheme: dark)');
  const touch = window.matchMedia('(pointer: coarse)').matches;
  const places = [...document.querySelectorAll('figure.chart')].map(figure => ({
    figure, plot: figure.querySelector('.plot'), spec: JSON.parse(figure.querySelector('script').textContent),
  }));
  const theme = layout => {
    const style = getComputedStyle(document.documentElement);
    const colour = name => style.getPropertyValue(name).trim();
    const axis = {gridcolor: colour('--line'), zerolinecolor: colour('--line'), linecolor: colour('--line'),
                  automargin: true};
    const modebar = {bgcolor: 'rgba(0,0,0,0)', color: colour('--soft'), activecolor: colour('--link')};
    const whole = {
      paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', margin: {t: 24, r: 12, b: 36, l: 44},
      hovermode: 'closest', modebar,
      legend: {orientation: 'h', y: 1.02, yanchor: 'bottom', x: 0, traceorder: 'normal'}, ...layout,
      font: {color: colour('--text'), family: 'system-ui, sans-serif', size: 12},
      dragmode: touch ? false : 'zoom', autosize: true,
    };
    const named = Object.keys(layout).filter(key => /^[xy]axis/.test(key));
    for (const name of new Set(['xaxis', 'yaxis', ...named])) {
      whole[name] = {...axis, ...layout[name]};
      if (whole[name].title) whole[name].title = {standoff: 8, ...whole[name].title};
    }
    if (layout.updatemenus) {
      whole.updatemenus = layout.updatemenus.map(menu => ({...menu, bgcolor: colour('--box'),
        bordercolor: colour('--line'), font: {color: dark.matches ? '#5b6675' : colour('--text')}}));
    }
    return whole;
  };
  const config = spec => ({responsive: true, displaylogo: false, scrollZoom: spec.zooms,
    modeBarButtons: [['toImage', 'zoom2d', 'pan2d', 'zoomIn2d', 'zoomOut2d', 'resetScale2d']],
    displayModeBar: touch ? spec.zooms : 'hover'});
  for (const {plot, spec} of places) {  // a phone has a line of the legend for each trace
    const lines = innerWidth < 600 && !parseInt(plot.style.minWidth) ? spec.data.length : 0;
    if (lines > 2) plot.style.height = `${parseInt(plot.style.height) + 20 * lines}px`;
  }
  const draw = () => Promise.all(places.map(({plot, spec}) =>
    Plotly.react(plot, spec.data, theme(spec.layout), config(spec))));
  for (const {figure, plot, spec} of places) {
    const input = figure.querySelector('input[type=range]');
    if (!input) continue;
    input.addEventListener('input', () => {
      const number = Number(input.value);
      figure.querySelector('output').textContent = spec.frames.names[number];
      spec.data[0].z = spec.frames.values[number];
      Plotly.restyle(plot, {z: [spec.data[0].z]}, [0]);
    });
  }
  dark.addEventListener('change', draw);
  draw().then(() => { document.documentElement.dataset.drawn = String(places.length); });
})();
"""

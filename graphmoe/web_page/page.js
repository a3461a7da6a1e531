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

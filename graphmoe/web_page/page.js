(async () => {
  const dark = window.matchMedia('(prefers-color-scheme: dark)');
  const touch = window.matchMedia('(pointer: coarse)').matches;
  const all = query => [...document.querySelectorAll(query)];

  // One box says what a word means, wherever it stands.
  const tip = document.body.appendChild(document.createElement('div'));
  Object.assign(tip, {id: 'tip', hidden: true, role: 'tooltip'});
  const hide = () => { tip.hidden = true; };
  const show = term => {
    tip.textContent = term.dataset.says;
    tip.hidden = false;
    const at = term.getBoundingClientRect(), {width, height} = tip.getBoundingClientRect();
    const below = at.bottom + height + 12 < innerHeight;
    tip.style.left = `${Math.max(8, Math.min(at.left, document.documentElement.clientWidth - width - 8))}px`;
    tip.style.top = `${below ? at.bottom + 6 : Math.max(8, at.top - height - 6)}px`;
  };
  for (const term of all('.term')) {
    term.setAttribute('aria-describedby', 'tip');
    for (const event of ['pointerenter', 'focus', 'click']) term.addEventListener(event, () => show(term));
    for (const event of ['pointerleave', 'blur']) term.addEventListener(event, hide);
  }
  addEventListener('scroll', hide, {passive: true, capture: true});
  addEventListener('keydown', ({key}) => { if (key === 'Escape') hide(); });

  // A click on a heading sorts: numbers by size, empty cells last.
  for (const table of all('table.sorted')) {
    const rows = [...table.tBodies[0].rows];
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const sort = () => {
        const sign = head.getAttribute('aria-sort') === 'ascending' ? -1 : 1;
        for (const other of head.parentElement.cells) other.removeAttribute('aria-sort');
        head.setAttribute('aria-sort', sign > 0 ? 'ascending' : 'descending');
        const key = row => row.cells[column].textContent.trim();
        const number = text => Number(text.replaceAll(',', '').replace(/%$/, ''));
        rows.sort((a, b) => {
          const [left, right] = [key(a), key(b)];
          if (!left || !right) return !left - !right;
          const by = number(left) - number(right);
          return sign * (Number.isNaN(by) ? left.localeCompare(right) : by);
        });
        table.tBodies[0].append(...rows);
      };
      head.tabIndex = 0;
      head.addEventListener('click', sort);
      head.addEventListener('keydown', ({key}) => { if (key === 'Enter') sort(); });
    });
  }

  const places = all('figure.chart').map(figure => ({
    figure, plot: figure.querySelector('.plot'), spec: JSON.parse(figure.querySelector('script').textContent),
  }));
  if (!places.length) return;
  try {  // Plotly stands in the page compressed
    const packed = Uint8Array.from(atob(document.getElementById('plotly').textContent), c => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
    const script = document.createElement('script');
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  } catch {
    for (const {plot} of places) plot.textContent =
      `${plot.getAttribute('aria-label')}. To draw it takes a browser of 2023 or later.`;
    return;
  }

  // Curves: over steps, tokens or time, smoothed or not, for all charts at once.
  const form = document.querySelector('.controls');
  const reached = JSON.parse(document.getElementById('reached')?.textContent ?? '{}');
  const hidden = new Set();
  const choice = name => form?.elements[name].value;
  const longest = Math.max(0, ...Object.values(reached).map(({time}) => time.at(-1)));
  const [unit, seconds] = longest > 7200 ? ['hours', 3600] : longest > 300 ? ['minutes', 60] : ['seconds', 1];
  const over = {step: 'step', tokens: 'tokens', time: `${unit} in steps`};
  const along = (run, steps, axis) => {
    const known = reached[run];
    if (axis === 'step' || !known || known.step.length < 2) return steps;
    let n = 0;
    return steps.map(step => {
      while (n < known.step.length - 2 && known.step[n + 1] < step) n++;
      const share = Math.min(1, Math.max(0, (step - known.step[n]) / (known.step[n + 1] - known.step[n])));
      const value = known[axis][n] + share * (known[axis][n + 1] - known[axis][n]);
      return axis === 'time' ? value / seconds : value;
    });
  };
  const smoothed = (steps, values, width) => {
    let sum = 0, weight = 0;
    return values.map((value, n) => {
      const kept = n ? Math.exp((steps[n - 1] - steps[n]) / width) : 0;
      [sum, weight] = [sum * kept + value, weight * kept + 1];
      return sum / weight;
    });
  };
  const traces = spec => !spec.curves ? spec.data : spec.data.flatMap(trace => {
    const {run, words, means, smooths} = trace.meta, axis = choice('x') ?? 'step';
    const share = Number(choice('smooth') ?? 0), steps = trace.x, number = axis === 'time' ? '.4~g' : ',';
    const line = {...trace, x: along(run, steps, axis), visible: !hidden.has(run), legendgroup: trace.name,
      hovertemplate: `${words ? `${words}<br>` : ''}${over[axis]} %{x:${number}}: <b>%{y:.5g}</b>`
        + (words ? '<extra></extra>' : '')};
    if (!share || !smooths || steps.length <= 30) return [line];
    const faint = {...line, mode: 'lines', opacity: 0.3, hoverinfo: 'skip', hovertemplate: '', showlegend: false};
    return [faint, {...line, y: smoothed(steps, means ?? trace.y, share * (steps.at(-1) - steps[0]))}];
  });
  const axes = spec => {
    if (!spec.curves) return spec.layout;
    const {xaxis, yaxis} = spec.layout, wanted = choice('y') ?? 'auto';
    const values = spec.data.flatMap(({y}) => y), [least, most] = [Math.min(...values), Math.max(...values)];
    const type = wanted === 'auto' ? yaxis.type : wanted === 'log' && least > 0 ? 'log' : 'linear';
    const digits = type !== 'log' ? {} : {  // left alone it writes 9 for 0.9
      tickformat: '~g', ...(most > 8 * least && most < 300 * least ? {dtick: 'D2'} : {})};
    return {...spec.layout, xaxis: {...xaxis, title: {text: over[choice('x') ?? 'step']}},
            yaxis: {...yaxis, ...digits, type: type ?? 'linear'}};
  };

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
    return whole;
  };
  const config = spec => ({responsive: true, displaylogo: false, scrollZoom: spec.zooms,
    modeBarButtons: [['toImage', 'zoom2d', 'pan2d', 'zoomIn2d', 'zoomOut2d', 'resetScale2d']],
    displayModeBar: touch ? spec.zooms : 'hover'});
  for (const {plot, spec} of places) {  // a phone has a line of the legend for each trace
    const shown = spec.layout.showlegend !== false && innerWidth < 600 && !parseInt(plot.style.minWidth);
    const lines = shown ? spec.data.length : 0;
    if (lines > 2) plot.style.height = `${parseInt(plot.style.height) + 20 * lines}px`;
  }
  const draw = (which = places) => Promise.all(which.map(({plot, spec}) =>
    Plotly.react(plot, traces(spec), theme(axes(spec)), config(spec))));
  const curves = places.filter(({spec}) => spec.curves);
  form?.addEventListener('change', () => draw(curves));
  for (const chip of all('.chips button')) {
    chip.addEventListener('click', () => {
      const {run} = chip.dataset;
      if (!hidden.delete(run)) hidden.add(run);
      chip.setAttribute('aria-pressed', String(!hidden.has(run)));
      draw(curves);
    });
  }
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
  dark.addEventListener('change', () => draw());
  await draw();
  document.documentElement.dataset.drawn = String(places.length);
})();

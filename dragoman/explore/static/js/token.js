// One target token: after which layer the model settles on it, and which source tokens it relies on.
import { element, setAttributes } from './dom.js';
import { drawChart, paintLater } from './draw.js';
import { chosenHead } from './grid.js';
import { addStrings, formatChange, formatNumber, formatProbability, hasString, translate } from './i18n.js';
import { headName } from './state.js';
import { dataTable, plainText, scrollRegion, setBar, valueBar } from './table.js';
import { fill, quoted, tokenLabel } from './text.js';
import { onTheme } from './theme.js';

const TOKEN_METHODS = ['attention_x_gradient', 'input_x_gradient', 'integrated_gradients', 'value_zeroing', 'occlusion'];

function tokenRanks(values) {
  const order = [...values.keys()].sort((a, b) => values[a] - values[b]);
  const ranks = new Float64Array(values.length);
  for (let i = 0; i < order.length;) {
    let j = i;
    while (j < order.length && values[order[j]] === values[order[i]]) j++;
    for (let k = i; k < j; k++) ranks[order[k]] = (i + j - 1) / 2;
    i = j;
  }
  return ranks;
}

// Spearman's rank correlation; null where one side is constant or there are fewer than three values.
export function rankCorrelation(first, second) {
  if (first.length < 3 || first.length !== second.length) return null;
  const [a, b] = [tokenRanks(first), tokenRanks(second)];
  const mean = (a.length - 1) / 2;
  let [ab, aa, bb] = [0, 0, 0];
  for (let i = 0; i < a.length; i++) {
    ab += (a[i] - mean) * (b[i] - mean);
    aa += (a[i] - mean) ** 2;
    bb += (b[i] - mean) ** 2;
  }
  return aa > 0 && bb > 0 ? ab / Math.sqrt(aa * bb) : null;
}

function tokenAgreement(value) {
  if (value === null) return 'token.agree.unknown';
  if (value < -0.3) return 'token.agree.opposed';
  if (value < 0.2) return 'token.agree.none';
  if (value < 0.5) return 'token.agree.weak';
  return value < 0.8 ? 'token.agree.partly' : 'token.agree.strong';
}

export function methodTitle(method) {
  return hasString(`method.${method}`) ? translate(`method.${method}`) : method.replaceAll('_', ' ');
}

// Mean weights of all cross-attention heads from target token t.
function tokenMeanAttention(ex, t) {
  const rows = ex.crossSites().flatMap((site) =>
    Array.from({ length: site.heads }, (_, head) => ex.crossRow(site.id, head, t)).filter(Boolean));
  if (!rows.length) return null;
  const mean = new Float32Array(rows[0].length);
  for (const row of rows) for (let i = 0; i < mean.length; i++) mean[i] += row[i] / rows.length;
  return mean;
}

export function mountToken(root, { store, api, current, onExplanation, announce, fail }) {
  const title = element('p', { class: 'lead' });
  const canvas = element('canvas', { class: 'chart', 'aria-hidden': 'true' });
  const chartBox = element('div', { class: 'chart-box' }, canvas);
  const lensTitle = element('h3');
  const lensNote = element('p', { class: 'quiet' });
  const lensTable = element('div');
  const lens = element('div', { class: 'lens' }, lensTitle, chartBox, lensTable, lensNote);
  const sourceTitle = element('h3');
  const methods = element('div', { class: 'segments wrap', role: 'group' });
  const agreement = element('p', { class: 'agreement' });
  const sources = element('div');
  const sourceNote = element('p', { class: 'quiet' });
  const source = element('div', { class: 'sources' }, sourceTitle, methods, agreement, sources, sourceNote);
  let method = null;
  let width = 0;
  let shown = {};

  function chosenStep(ex) {
    const { step } = store.get();
    const count = ex.target?.tokens?.length ?? 0;
    return step === null ? 0 : Math.min(step, Math.max(0, count - 1));
  }

  function lensRanks(ex, t) {
    const ranks = ex.lens && ex.tensor(ex.lens.rank);
    if (!ranks) return null;
    const [layers, steps] = ranks.shape;
    return t < steps ? Array.from({ length: layers }, (_, layer) => ranks.data[layer * steps + t]) : null;
  }

  function paint() {
    const ex = current();
    const ranks = ex && lensRanks(ex, chosenStep(ex));
    if (!ranks || !width) return;
    const most = Math.max(10, ...ranks);
    const ticks = [1, 10, 100, 1000, 10000, 100000].filter((tick) => tick <= most * 1.01);
    drawChart(canvas, {
      width, height: 190, log: true,
      series: [{ points: ranks.map((rank, layer) => [layer, rank]), accent: true, dots: true }],
      x: [-0.3, ranks.length - 0.7],
      y: [most * 1.2, 1],
      xTicks: ranks.map((_, layer) => [layer, ex.lens.layers[layer] ?? String(layer)]),
      yTicks: ticks.map((tick) => [tick, tick.toLocaleString('en')]),
    });
  }

  function showLens(ex, t) {
    const ranks = lensRanks(ex, t);
    lens.hidden = !ranks;
    if (!ranks) return;
    lensTitle.textContent = translate('token.lens');
    lensNote.textContent = translate('token.lensNote');
    const top = (layer) => (ex.lens.top?.[layer]?.[t] ?? []).slice(0, 5);
    lensTable.replaceChildren(scrollRegion(translate('token.lensCaption'), dataTable({
      caption: translate('token.lensCaption'),
      className: 'lens-table',
      hideCaption: true,
      columns: [{ title: translate('token.layer') }, { title: translate('token.rank'), number: true }, { title: translate('token.top') }],
      rows: ranks.map((rank, layer) => [
        ex.lens.layers[layer] ?? String(layer),
        rank.toLocaleString('en'),
        element('span', { class: 'guesses' }, top(layer).map(([text, p]) => element('span', { class: 'guess' },
          plainText(tokenLabel({ text }), ex.target.lang), ' ', element('span', { class: 'quiet' }, formatProbability(p))))),
      ]),
    })));
    paintLater(paint);
  }

  function available(ex) {
    return (ex.attribution ?? []).filter((each) => ex.tensor(each.source));
  }

  function showMethods(ex) {
    const have = available(ex).map((each) => each.method);
    const known = api ? [...new Set([...have, ...(ex.model?.attributions ?? TOKEN_METHODS)])] : have;
    methods.hidden = known.length < 2;
    methods.setAttribute('aria-label', translate('token.method'));
    methods.replaceChildren(...known.map((each) => element('button', {
      type: 'button', 'aria-pressed': each === method, onclick: () => chooseMethod(each),
    }, methodTitle(each))));
  }

  async function chooseMethod(wanted) {
    const ex = current();
    if (available(ex).some((each) => each.method === wanted)) {
      method = wanted;
      show();
      return;
    }
    for (const button of methods.querySelectorAll('button')) button.disabled = true;
    try {
      const answer = await api.attribute(wanted);
      ex.addTensors(answer.tensors);
      ex.attribution = [...(ex.attribution ?? []), answer.attribution];
      method = wanted;
      announce(translate('token.methodReady', { method: methodTitle(wanted) }));
    } catch (error) {
      fail(error);
    }
    if (current() === ex) show();
  }

  // A language model has no source: it reads its own text, one position earlier.
  function inputTokens(ex) {
    return ex.source?.tokens?.length ? ex.source.tokens : [{ text: '<s>' }, ...ex.target.tokens.slice(0, -1)];
  }

  function showSources(ex, t) {
    const entry = available(ex).find((each) => each.method === method) ?? available(ex)[0] ?? null;
    method = entry?.method ?? null;
    const count = inputTokens(ex).length;
    const tensor = entry && ex.tensor(ex.source?.tokens?.length ? entry.source : entry.target ?? entry.source);
    const attribution = tensor && t < tensor.shape[0] && tensor.shape[1] === count
      ? tensor.data.subarray(t * count, (t + 1) * count) : null;
    const mean = tokenMeanAttention(ex, t);
    const chosen = chosenHead(ex, store.get());
    const site = chosen && ex.site(chosen.site);
    const head = site?.group === 'cross' ? ex.crossRow(chosen.site, chosen.head, t) : null;
    const columns = [
      attribution && { id: method, title: methodTitle(method), values: attribution, signed: entry.signed },
      mean && { id: 'mean', title: translate('token.meanAttention'), values: mean },
      head && { id: 'head', title: translate('token.headAttention', { name: headName(chosen.site, chosen.head) }), values: head },
    ].filter(Boolean);
    source.hidden = !columns.length;
    if (!columns.length) return;
    sourceTitle.replaceChildren(...fill(translate('token.sources'), { token: quoted(tokenLabel(ex.target.tokens[t]), ex.target.lang) }));
    showMethods(ex);
    for (const column of columns) column.most = Math.max(1e-9, ...Array.from(column.values, Math.abs));
    const state = store.get();
    const missing = ex.missing?.attribution;
    sourceNote.textContent = [
      entry && typeof entry.gap === 'number' ? translate('token.gap', { gap: formatNumber(100 * entry.gap, 1) }) : '',
      attribution && entry.signed ? translate('token.signs') : '',
      missing ?? '',
    ].filter(Boolean).join(' ');
    agreement.hidden = !(attribution && mean);
    if (attribution && mean) {
      const sizes = Array.from(attribution, Math.abs);
      const value = rankCorrelation(sizes, mean);
      const first = sizes.indexOf(Math.max(...sizes));
      // Ranks among small numbers say little where both name the same token.
      const same = value !== null && value < 0.8 && first === mean.indexOf(Math.max(...mean));
      agreement.replaceChildren(...fill(translate(same ? 'token.agree.same' : tokenAgreement(value)), {
        value: formatNumber(value), source: quoted(tokenLabel(inputTokens(ex)[first]), ex.source?.lang),
      }));
    }
    const key = columns.map((column) => column.id).join(' ');
    const now = `${t} ${method} ${head && headName(chosen.site, chosen.head)}`;
    if (shown.ex !== ex || shown.key !== key) {
      shown = { ex, key, rows: inputTokens(ex).map((token, i) => sourceRow(ex, token, i, columns.length)) };
      sources.replaceChildren(scrollRegion(translate('token.sourcesCaption'), dataTable({
        caption: translate('token.sourcesCaption'),
        className: 'sources-table',
        hideCaption: true,
        columns: [{ title: translate('token.sourceToken') }, ...columns.map((column) => ({ title: column.title, className: 'bar-cell' }))],
        rows: shown.rows,
      })));
    }
    if (head) sources.querySelector('th:last-child').textContent = columns.at(-1).title;
    shown.rows.forEach(([name, ...cells], i) => {
      setAttributes(name.closest('tr'), { class: i === state.src && ex.source.tokens.length ? 'is-chosen' : null });
      if (shown.now === now) return;
      cells.forEach((cell, c) => {
        const { values, most, signed } = columns[c];
        cell.firstChild.firstChild.data = (signed ? formatChange : formatNumber)(values[i], 3);
        setBar(cell.lastChild, values[i], most, signed);
      });
    });
    shown.now = now;
  }

  // Cells of one source token; showSources puts the numbers into them.
  function sourceRow(ex, token, i, count) {
    const name = element('button', { type: 'button', class: 'link', onclick: () => store.set(ex.source.tokens.length ? { src: i } : { step: Math.max(0, i - 1) }) }, plainText(tokenLabel(token), ex.source.lang));
    return [name, ...Array.from({ length: count }, () => element('span', { class: 'bar-pair' }, element('span', { class: 'bar-value' }, ' '), valueBar(0, 1)))];
  }

  function show() {
    const ex = current();
    const tokens = ex.target?.tokens ?? [];
    if (!tokens.length) return;
    const t = chosenStep(ex);
    const step = ex.steps?.[t];
    title.replaceChildren(...fill(translate(step ? 'token.lead' : 'token.leadPlain'), {
      token: element('b', {}, quoted(tokenLabel(tokens[t]), ex.target.lang)),
      number: String(t + 1),
      all: String(tokens.length),
      p: formatProbability(Math.exp(step?.logprob ?? 0)),
    }));
    showLens(ex, t);
    showSources(ex, t);
  }

  new ResizeObserver(() => {
    if (Math.abs(chartBox.clientWidth - width) < 1) return;
    width = chartBox.clientWidth;
    paint();
  }).observe(chartBox);
  root.append(title, element('div', { class: 'halves' }, lens, source));
  root.dataset.widget = 'token';
  onExplanation(() => {
    shown = {};
    show();
  });
  store.subscribe((state, changed) => {
    if (!current()) return;
    if (changed.has('step') || (changed.has('site') && state.step === null)) show();
    else if (['src', 'site', 'head'].some((key) => changed.has(key)) && current().target?.tokens?.length) showSources(current(), chosenStep(current()));
  });
  onTheme(paint);
}

addStrings(
  {
    'token.lead': '{token} is token {number} of {all}; the model gave it probability {p}.',
    'token.leadPlain': '{token} is token {number} of {all}.',
    'token.lens': 'Rank of the token after each layer',
    'token.lensCaption': 'Rank after each decoder layer and the five most probable tokens there',
    'token.lensNote': 'Each layer’s state goes through the final norm and the output matrix (logit lens). Early layers were not trained for this: read their words as hints.',
    'token.layer': 'Layer',
    'token.rank': 'Rank',
    'token.top': 'Most probable tokens',
    'token.sources': 'What {token} relies on',
    'token.sourcesCaption': 'Source tokens: attribution beside attention',
    'token.sourceToken': 'Source token',
    'token.meanAttention': 'Mean attention',
    'token.headAttention': 'Head {name}',
    'token.method': 'Attribution method',
    'token.methodReady': 'Attribution by {method} is shown.',
    'token.gap': 'The method’s sums miss the model’s change by {gap} %.',
    'token.signs': 'A source token with + made the word more probable, with − less probable.',
    'token.agree.same': 'Attention and attribution both point to {source}; the ranks of all tokens correlate by {value}.',
    'token.agree.strong': 'Attention and attribution agree strongly, {value}: here attention is a fair guide.',
    'token.agree.partly': 'Attention and attribution agree in part, {value}.',
    'token.agree.weak': 'Attention and attribution agree weakly, {value}: what was read is not all that mattered.',
    'token.agree.none': 'Attention and attribution do not agree, {value}: what was read is not what mattered.',
    'token.agree.opposed': 'Attention and attribution point to opposite tokens, {value}.',
    'token.agree.unknown': 'There is too little to compare attention with attribution here.',
    'method.attention_x_gradient': 'Attention × gradient',
    'method.input_x_gradient': 'Input × gradient',
    'method.integrated_gradients': 'Integrated gradients',
    'method.value_zeroing': 'Value zeroing',
    'method.occlusion': 'Occlusion',
  },
  {
    'token.lead': '{token} 是第 {number} 个词元，共 {all} 个；模型给它的概率是 {p}。',
    'token.leadPlain': '{token} 是第 {number} 个词元，共 {all} 个。',
    'token.lens': '每层之后该词元的名次',
    'token.lensCaption': '每个解码器层之后的名次，以及概率最高的五个词元',
    'token.lensNote': '把每层的状态送入最后的归一化和输出矩阵（logit lens）。前面的层并未为此训练，只可当作提示。',
    'token.layer': '层',
    'token.rank': '名次',
    'token.top': '概率最高的词元',
    'token.sources': '{token} 依赖什么',
    'token.sourcesCaption': '原文词元：归因与注意力对照',
    'token.sourceToken': '原文词元',
    'token.meanAttention': '平均注意力',
    'token.headAttention': '头 {name}',
    'token.method': '归因方法',
    'token.methodReady': '已显示{method}的归因。',
    'token.gap': '该方法之和与模型的变化相差 {gap} %。',
    'token.signs': '带 + 的原文词元使这个词更可能，带 − 的使它更不可能。',
    'token.agree.same': '注意力与归因都指向 {source}；所有词元排序的相关系数为 {value}。',
    'token.agree.strong': '注意力与归因高度一致，{value}：此处注意力可以参考。',
    'token.agree.partly': '注意力与归因部分一致，{value}。',
    'token.agree.weak': '注意力与归因只有弱的一致，{value}：读到的并不就是起作用的全部。',
    'token.agree.none': '注意力与归因不一致，{value}：读到的并不是起作用的。',
    'token.agree.opposed': '注意力与归因指向相反的词元，{value}。',
    'token.agree.unknown': '可比较的太少，无法比较注意力与归因。',
    'method.attention_x_gradient': '注意力 × 梯度',
    'method.input_x_gradient': '输入 × 梯度',
    'method.integrated_gradients': '积分梯度',
    'method.value_zeroing': '值置零',
    'method.occlusion': '遮挡',
  },
);

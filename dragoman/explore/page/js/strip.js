// The translation as running text: probabilities, where each token was read from, alternatives, steps of decoding.
import { make, setAttributes, setChildren } from './dom.js';
import { addTexts, currentLanguage, formatNumber, formatScore, translate } from './i18n.js';
import { rovingFocus } from './keys.js';
import { formatLogprob, joinTexts, sentence, termList } from './parts.js';
import { compareTokens, quoted, renderText, tokenLabel } from './text.js';

const stripText = addTexts('strip', {
  title: ['Translation', '译文'],
  'title@other': ['Prediction', '预测'],
  'title@tag': ['Tags', '标注'],
  'title@language': ['Text', '文字'],
  purpose: ['Select a word of the translation to see where it was read from, how sure the model was and what it nearly wrote instead.', '选中译文中的一个词，看它读自哪里、模型有多大把握、差点写成什么。'],
  'purpose@other': ['What the model predicted, how sure it was, and which tokens counted.', '模型预测了什么、有多大把握、哪些词元起了作用。'],
  source: ['Source', '原文'],
  'source@other': ['Input', '输入'],
  classes: ['Classes', '类别'],
  low: ['below 0.5', '低于 0.5'],
  forced: ['forced by you', '由你指定'],
  weighted: ['weight for the selected token', '对选中词元的作用大小'],
  nameTarget: ['target {at} of {count}, {text}, probability {p}', '译文第 {at} 个，共 {count} 个，{text}，概率 {p}'],
  nameStrongest: [', strongest source {source}', '，最强的原文 {source}'],
  nameForced: [', forced', '，已指定'],
  nameLater: ['target {at} of {count}, not yet predicted', '译文第 {at} 个，共 {count} 个，尚未预测'],
  nameSource: ['source {at} of {count}, {text}', '原文第 {at} 个，共 {count} 个，{text}'],
  weight: [', {part} of the {measure}', '，占{measure}的 {part}'],
  attribution: ['attribution', '归因'],
  attention: ['mean cross-attention', '平均交叉注意力'],
  step: ['Token {at} of {count}', '第 {at} 个词元，共 {count} 个'],
  back: ['One step back', '后退一步'],
  forward: ['One step forward', '前进一步'],
  dock: ['Selected token', '选中的词元'],
  time: ['Step through: hide what came later', '逐步播放：隐藏之后的内容'],
  read: ['{token} was read mostly from {source}: {part} of the {measure}.', '{token} 主要读自 {source}：占{measure}的 {part}。'],
  'read@other': ['{source} counted most for {token}: {part} of the {measure}.', '对 {token} 作用最大的是 {source}：占{measure}的 {part}。'],
  readOther: ['Attention disagrees: its mean over heads is mostly on {source}, {part}; compare both under One token.', '注意力不同意：各头平均主要落在 {source} 上，占 {part}；请在“单个词元”中比较两者。'],
  readHead: ['Head {head} attends to it most, with weight {weight}.', '头 {head} 对它的注意力最大，权重 {weight}。'],
  openHead: ['Show this head', '显示这个头'],
  probability: ['Probability', '概率'],
  rank: ['Rank', '排名'],
  entropy: ['Entropy', '熵'],
  nats: ['{value} nats', '{value} 奈特'],
  logprob: ['Log-probability', '对数概率'],
  cumulative: ['Sum so far', '累计'],
  masked: ['{count} tokens were forbidden here.', '此处禁止了 {count} 个词元。'],
  alternatives: ['Alternatives', '备选'],
  takeServed: ['Take one: what is before it stays, the rest is translated again.', '采用一个：之前的不变，之后的重新翻译。'],
  takeReady: ['This file has those marked “ready”; dragoman explore can take them all.', '这个文件只含标有“就绪”的备选；dragoman explore 可以采用全部。'],
  takeNone: ['To take one, write the file with --branches 2 or use dragoman explore.', '要采用备选，请用 --branches 2 写出文件，或使用 dragoman explore。'],
  chosen: ['chosen', '已选'],
  ready: ['ready', '就绪'],
  changes: ['What changed', '有何变化'],
  summary: ['{changed} of {count} tokens changed, score {before} → {after}', '{count} 个词元中有 {changed} 个改变，得分 {before} → {after}'],
  before: ['Before', '之前'],
  after: ['After', '之后'],
  changed: ['changed', '改变'],
  new: ['new', '新增'],
  undo: ['Back to before', '回到之前'],
  dismiss: ['Close the comparison', '关闭对比'],
  reference: ['Your reference, scored by the model', '你的参考译文，由模型打分'],
  search_error: ['Search error: the model scores your reference {reference}, what the search found {own}; a better search would have preferred it.', '搜索错误：模型给参考译文 {reference}，给搜索所得 {own}；更好的搜索会选参考译文。'],
  cut: ['Search error: the model’s own translation ({own}) was cut at its maximum length; your reference ({reference}) ends, so it ranks first.', '搜索错误：模型自己的译文（{own}）在最大长度处被截断；参考译文（{reference}）有结尾，因此排在它之前。'],
  equal: ['The model scores your reference as its own translation, {own}.', '模型给参考译文和自己的译文相同的得分 {own}。'],
  model_error: ['Model error: the model scores your reference {reference}, its own translation {own}; no search would have found your reference.', '模型错误：模型给参考译文 {reference}，给自己的译文 {own}；任何搜索都不会找到参考译文。'],
  own: ['Its own translation:', '它自己的译文：'],
  same: ['The model’s translation is your reference.', '模型的译文就是你的参考译文。'],
});

export const formatPart = (value) => `${value > 0 && value < 0.01 ? '<1' : Math.round(100 * value)}\u00a0%`;

// Near zero, two digits would hide what a sure token costs.
const stripLog = (value) => formatNumber(value, Math.abs(value) < 0.1 ? 3 : 2);

// The full name of a target token for screen readers: position, text, probability, strongest source token.
function stripTargetName(ex, t) {
  const { logprob, forced } = ex.steps[t];
  const source = ex.source.tokens[ex.sourceWeights(t)?.strongest];
  const text = tokenLabel(ex.outputToken(t));
  return stripText('nameTarget', { at: t + 1, count: ex.target.tokens.length, text, p: formatLogprob(logprob) })
    + (source ? stripText('nameStrongest', { source: tokenLabel(source) }) : '')
    + (forced ? stripText('nameForced') : '');
}

export function languageName(code) {
  try {
    return new Intl.DisplayNames([currentLanguage()], { type: 'language' }).of(code);
  } catch {
    return code; // not a language code
  }
}

// The word that a token is part of, unless it is too long for a sentence.
function stripWord(side, index) {
  const range = side.words.find(([from, to]) => from <= index && index < to) ?? [0, 0];
  const spans = side.tokens.slice(...range).flatMap(({ span }) => span);
  const word = [...side.text].slice(spans[0] ?? 0, spans.at(-1) ?? 0).join('').trim();
  return quoted(word && word.length <= 40 ? word : tokenLabel(side.tokens[index]), side.lang);
}

const stripOutputWord = (ex, t) => (ex.hasClasses ? quoted(tokenLabel(ex.outputToken(t)), ex.target.lang) : stripWord(ex.target, t));

export function shellQuote(text) {
  if (/^[\w./-]+$/.test(text)) return text;
  if (!/[\t\n]/.test(text)) return `'${text.replace(/'/g, "'\\''")}'`;
  return `$'${text.replace(/[\\']/g, '\\$&').replace(/\t/g, '\\t').replace(/\n/g, '\\n')}'`;
}

// The command that writes this page again, for files without a model behind them.
export function explainCommand(ex, extra = []) {
  const { text, beam, length_penalty: penalty, reference, off } = ex.request;
  const [tag] = ex.source.tokens;
  const to = tag?.special && /^<2([\w-]+)>$/.exec(tag.text)?.[1]; // of a model of several directions
  const options = {
    '--to': to,
    '--beam': beam,
    '--length-penalty': penalty,
    '--reference': reference && shellQuote(reference),
    '--off': !extra.includes('--off') && off?.join(','),
  };
  return [
    'dragoman explain',
    ...(ex.model.path === '' ? [] : ['-m', shellQuote(ex.model.path || 'MODEL')]), // '': the built-in one
    shellQuote(text ?? ex.source.text),
    ...Object.entries(options).filter(([, value]) => value || value === 0).flat(), ...extra, '--html explorer.html',
  ].join(' ');
}

// How an output differs from the one before: in one line, and as both texts with marks on their tokens.
export function compareTexts(before, after) {
  const { marks, stayed } = compareTokens(...[before, after].map((each) => each.target.tokens.map((token) => token.id)));
  const markText = (key, { target: side }, mark) => {
    const run = make('bdi.run.small', { dir: side.dir || 'auto', lang: side.lang });
    for (const node of renderText(side, `compare-${key}`).run.childNodes) {
      const { token, label } = node.firstChild?.dataset ?? {};
      const kind = token && mark(Number(token));
      const tag = { kept: 'span', gone: 'del' }[kind] ?? 'ins';
      run.append(kind ? make(`${tag}.${kind}`, { 'data-label': label }, node.textContent) : node.textContent);
    }
    return make('div', make('h4', stripText(key)), run);
  };
  return [
    make('p.answer', stripText('summary', {
      changed: marks.filter((mark) => mark !== 'kept').length,
      count: marks.length,
      before: stripLog(before.score?.sum),
      after: stripLog(after.score?.sum),
    })),
    markText('before', before, (index) => (stayed[index] ? 'kept' : 'gone')),
    markText('after', after, (index) => marks[index]),
    make('p.legend', ['changed', 'new'].map((key) => make(`span.key.${key}`, stripText(key)))),
  ];
}

export function mountStrip(body, { store, api, current, onExplanation, announce, wait, replace, visit, fail }) {
  const texts = make('div.texts', { 'data-widget': 'strip' });
  const clock = make('div.clock.row');
  const detail = make('div.detail');
  const compare = make('div.compare', { hidden: true });
  const judged = make('div.reference', { hidden: true });
  let ex = null;
  let source = null;
  let target = null;
  let isTags = false; // which no search finds one after the other
  let comparison = null; // {before, after}, two explanations

  const move = (by) => () => {
    const step = (store.get().step ?? 0) + by;
    if (!ex.steps[step]) return;
    store.set({ step });
    announce(stripTargetName(ex, step));
  };
  // Back and forward, once under the text and once in the dock.
  const steppers = [['back', -1, '←'], ['forward', 1, '→']].flatMap(([key, by, arrow]) =>
    [0, 1].map(() => ({ key, by, button: make('button', { onclick: move(by) }, arrow) })));
  const [back, dockBack, forward, dockForward] = steppers.map(({ button }) => button);
  const where = make('span.number');
  const timeBox = make('input', { type: 'checkbox', onchange: () => store.set({ time: timeBox.checked }) });
  const timeLabel = make('span');
  clock.append(back, where, forward, make('label.check', timeBox, timeLabel));

  // The selected token in one line at the foot of the window, while the text itself is out of sight.
  const dockText = make('button.plain.text', { onclick: () => visit('strip') });
  const dock = make('div.dock', { role: 'group', hidden: true }, dockBack, dockText, dockForward);
  body.append(texts, clock, detail, compare, judged);
  body.closest('main').append(dock);
  new IntersectionObserver(([{ isIntersecting, boundingClientRect }]) => {
    dock.hidden = isIntersecting || boundingClientRect.top > 0 || !ex?.steps.length;
  }).observe(texts);

  function focusTarget(t) {
    target.roving?.focus(target.items[Math.min(t, target.items.length - 1)]);
  }

  function buildSide(name, key) {
    const side = ex[name];
    const id = `strip-${name}`;
    const { run, items } = renderText(side, name);
    run.setAttribute('aria-labelledby', id);
    const select = (item) => store.set({ [key]: Number(item.dataset.token) });
    const roving = rovingFocus(run, { items: () => items, rtl: () => side.dir === 'rtl', vertical: true, onMove: select, onPress: select });
    const language = side.lang && make('span.quiet', ` · ${languageName(side.lang)}`);
    const title = translate(name === 'source' ? 'strip.source' : 'strip.title');
    return { items, roving, node: make(`div.side.${name}`, make('h3', { id }, title, language), run) };
  }

  // The classes of a classifier with their probabilities; of a pair, the target is its second text.
  function buildClasses() {
    const [{ id: chosen, top }] = ex.steps;
    const isPair = ex.model.task === 'pairs';
    const logprobs = new Map(top.map(([id, , logprob]) => [id, logprob]));
    const classes = isPair ? top.map(([id, text]) => ({ id, text })) : ex.target.tokens;
    return {
      items: [],
      node: make('div.side.target',
        isPair && make('bdi.run.small', { dir: ex.target.dir }, ex.target.text),
        make('h3', { id: 'strip-target' }, stripText('classes')),
        make('ul.classes', { 'aria-labelledby': 'strip-target' }, classes.map(({ id, text }) => {
          const logprob = logprobs.get(id);
          return make('li', { class: id === chosen ? 'chosen' : null, var: { p: Math.exp(logprob ?? -Infinity).toFixed(4) } },
            make('bdi', tokenLabel({ text })), make('span.number', logprobs.has(id) ? formatLogprob(logprob) : '–'));
        }))),
    };
  }

  function build() {
    const hadFocus = texts.contains(document.activeElement);
    source = buildSide('source', 'src');
    target = ex.hasClasses ? buildClasses() : buildSide('target', 'step');
    source.node.hidden = !ex.source.tokens.length;
    const keys = { probability: true, low: true, forced: ex.steps.some((step) => step.forced), weighted: ex.sourceWeights(0) };
    const legend = Object.keys(keys).filter((key) => keys[key]).map((key) => make(`span.key.${key}`, stripText(key)));
    setChildren(texts, make('p.cut', { hidden: !ex.missing.text }, ex.missing.text), source.node, target.node, make('p.legend', legend));
    clock.hidden = ex.steps.length < 2;
    timeLabel.textContent = stripText('time');
    dock.ariaLabel = stripText('dock');
    for (const { button, key } of steppers) button.ariaLabel = stripText(key);
    update(store.get());
    // A new explanation that arrives while a token has the focus must not lose it.
    if (hadFocus) texts.querySelector('.target [tabindex="0"]')?.focus({ preventScroll: true });
    showReference();
    if (comparison?.after !== ex && comparison?.before !== ex) comparison = null;
    showComparison();
  }

  function update(state) {
    const t = state.step ?? 0;
    const weights = ex.sourceWeights(t);
    const most = Math.max(...weights?.values ?? [], 1e-9);
    target.items.forEach((button, index) => {
      const later = state.time && index > t;
      setAttributes(button, { 'aria-current': index === state.step || null });
      if (button.dataset.later === String(later)) return;
      const step = ex.steps[index];
      const p = later || !step ? 0 : Math.exp(step.logprob);
      setAttributes(button, {
        'data-later': String(later),
        'aria-label': later ? stripText('nameLater', { at: index + 1, count: target.items.length })
          : step ? stripTargetName(ex, index) : tokenLabel(ex.target.tokens[index]),
        var: { p: p.toFixed(4) },
      });
      button.classList.toggle('low', !later && p < 0.5);
      button.classList.toggle('forced', !later && Boolean(step?.forced));
      button.classList.toggle('later', later);
    });
    const measure = stripText(weights?.from);
    source.items.forEach((button, index) => {
      const part = weights?.values[index] ?? 0;
      const text = tokenLabel(ex.source.tokens[index]);
      setAttributes(button, {
        'aria-current': index === state.src || null,
        'aria-label': stripText('nameSource', { at: index + 1, count: source.items.length, text })
          + (weights ? stripText('weight', { part: formatPart(part), measure }) : ''),
        var: { w: (part / most).toFixed(4) },
      });
      button.classList.toggle('strongest', weights?.strongest === index);
    });
    target.roving?.refresh(target.items[t]);
    source.roving.refresh(source.items[state.src ?? Math.max(weights?.strongest ?? 0, 0)]);
    where.textContent = stripText('step', { at: t + 1, count: ex.steps.length });
    for (const { button, by } of steppers) button.disabled = !ex.steps[t + by];
    timeBox.checked = state.time;
    showDetail(t, weights?.strongest >= 0 ? weights : null);
  }

  // The dock, and under the text what is known about token t.
  function showDetail(t, weights) {
    const step = ex.steps[t];
    setChildren(detail);
    if (!step) return;
    setChildren(dockText,
      stripOutputWord(ex, t), ` ${formatLogprob(step.logprob)}`,
      weights && [' ← ', stripWord(ex.source, weights.strongest)],
      make('span.quiet', ` · ${where.textContent}`),
    );
    const facts = {
      probability: formatLogprob(step.logprob),
      rank: String(step.rank),
      entropy: stripText('nats', { value: formatNumber(step.entropy) }),
      logprob: stripLog(step.logprob),
      cumulative: stripLog(ex.steps.slice(0, t + 1).reduce((total, each) => total + each.logprob, 0)),
    };
    // Padding and the like are forbidden everywhere; more than that is worth a sentence.
    const usual = Math.min(...ex.steps.map((each) => each.masked));
    detail.append(make('div.reading', weights && readSentence(t, weights), weights && disagreement(t, weights),
      termList('facts.number', Object.entries(facts).map(([key, value]) => [stripText(key), value])),
      step.masked > usual && make('p.quiet', stripText('masked', { count: step.masked }))));
    if (!ex.hasClasses) detail.append(buildAlternatives(t, step));
  }

  function readSentence(t, { from, strongest, values }) {
    const { name, weight, site, head, src } = ex.strongestHead(t) ?? {};
    const open = () => {
      store.set({ site, head, src, zoom: null });
      visit('head');
    };
    return make('p.answer',
      sentence('strip.read', {
        token: stripOutputWord(ex, t),
        source: stripWord(ex.source, strongest),
        part: formatPart(values[strongest]),
        measure: stripText(from),
      }),
      name && [' ', ...sentence('strip.readHead', { head: make('strong', name), weight: formatNumber(weight) }), ' ',
        make('button.plain.inline', { onclick: open }, stripText('openHead'))]);
  }

  // Attribution and attention are two measures: where their strongest words differ, the page shows both.
  function disagreement(t, { from, strongest }) {
    const mean = from === 'attribution' && ex.strongestHead(t) ? ex.attentionMean(t) : null;
    const sums = mean ? ex.source.words.map((range) => mean.slice(...range).reduce((a, b) => a + b, 0)) : [];
    const best = sums.indexOf(Math.max(...sums));
    const [first, end] = ex.source.words[best] ?? [];
    if (best < 0 || (first <= strongest && strongest < end)) return null;
    return make('p.quiet', sentence('strip.readOther', { source: stripWord(ex.source, first), part: formatPart(sums[best]) }));
  }

  function buildAlternatives(t, step) {
    const { lang } = ex.target;
    const options = step.top.map(([id, text, logprob], rank) => {
      const note = id === step.id ? stripText('chosen') : !api && ex.branches[`${t}:${id}`] ? stripText('ready') : '';
      const [label, p] = [tokenLabel({ text }), formatLogprob(logprob)];
      return make('li', {
        role: 'option',
        'aria-selected': id === step.id,
        'aria-label': joinTexts([label, p, note], ', '),
        'data-id': id,
        var: { p: Math.exp(logprob).toFixed(4) },
      }, make('span.rank.number', rank + 1), make('bdi.alt', { lang }, label), make('span.note', note), make('span.number', p));
    });
    const list = make('ul.alternatives', {
      role: 'listbox',
      'aria-labelledby': 'strip-alternatives',
      'data-widget': 'alternatives',
      onkeydown: (event) => {
        if (event.key !== 'Escape') return;
        event.preventDefault();
        focusTarget(t);
      },
    }, options);
    rovingFocus(list, { items: () => options, vertical: true, onPress: (option) => take(t, Number(option.dataset.id)) });
    const hint = api ? 'strip.takeServed' : Object.keys(ex.branches).length ? 'strip.takeReady' : 'strip.takeNone';
    return make('div.choices',
      make('h3', { id: 'strip-alternatives' }, stripText('alternatives')), list, !isTags && make('p.quiet', translate(hint)));
  }

  // Translate again with another token at step t: ask the model, or use what the file has.
  async function take(t, id) {
    const before = ex;
    if (isTags || id === ex.steps[t].id) return;
    if (api) {
      try {
        comparison = { before, after: await wait(api.branch(t, id)) };
      } catch (error) {
        fail(error);
        return;
      }
      replace(comparison.after);
      focusTarget(t);
    } else {
      const after = ex.branches[`${t}:${id}`];
      if (!after) return;
      comparison = { before, after };
      showComparison();
    }
    announce(compare.querySelector('.answer').textContent);
  }

  function showComparison() {
    compare.hidden = !comparison;
    if (!comparison) return;
    const { before, after } = comparison;
    const close = () => {
      comparison = null;
      showComparison();
      focusTarget(store.get().step ?? 0);
    };
    const undo = () => {
      comparison = null;
      replace(before);
    };
    setChildren(compare,
      make('h3', stripText('changes')),
      ...compareTexts(before, after),
      make('div.row',
        ex === after && make('button', { onclick: undo }, stripText('undo')),
        make('button.plain', { onclick: close }, stripText('dismiss'))),
    );
  }

  // How the model scores the reference, as the library judged it.
  function showReference() {
    const { reference: given, own } = ex.score;
    judged.hidden = !given || !ex.request.reference;
    if (judged.hidden) return;
    const [best] = ex.nbest;
    const isCut = given.verdict === 'search_error' && given.normalised <= own.normalised;
    const scores = { reference: formatScore(given.normalised), own: formatScore(own.normalised) };
    setChildren(judged,
      make('h3', stripText('reference')),
      make('p.answer', stripText(isCut ? 'cut' : given.verdict, scores)),
      make('p', { hidden: !best?.text }, stripText('own'), ' ', quoted(best?.text ?? '', ex.target.lang)),
    );
  }

  onExplanation((shown) => {
    ex = shown;
    isTags = ex.model.task === 'tag';
    build();
  });
  store.subscribe((state, changed) => {
    if (ex && current() === ex && ['step', 'src', 'time'].some((key) => changed.has(key))) update(state);
  });
  document.addEventListener('explorer:alternatives', () => detail.querySelector('[role="option"][tabindex="0"]')?.focus());
}

// The request: text, beam, length penalty, forced beginning, reference. In a file it is read only.
import { make, setChildren } from './dom.js';
import { addTexts, formatNumber } from './i18n.js';
import { copyAddress, joinTexts, termList } from './parts.js';
import { explainCommand, languageName } from './strip.js';
import { formatFragment, fragmentText } from './url.js';

const askText = addTexts('ask', {
  title: ['Your sentence', '你的句子'],
  'title@other': ['Your input', '你的输入'],
  purpose: ['What the model was asked to translate, and how it searched.', '要模型翻译的文字，以及搜索的方式。'],
  'purpose@other': ['What the model was given.', '给模型的内容。'],
  text: ['Text to translate', '要翻译的文字'],
  'text@other': ['Input', '输入'],
  submit: ['Translate', '翻译'],
  'submit@other': ['Run', '运行'],
  to: ['Translate into', '译成'],
  auto: ['automatic', '自动'],
  beam: ['Beam', '束宽'],
  penalty: ['Length penalty', '长度惩罚'],
  more: ['Force a beginning, or compare a reference', '指定开头，或比较参考译文'],
  prefix: ['Forced beginning', '指定的开头'],
  prefixHint: ['The model must write this first; its tokens keep the model’s own probabilities.', '模型必须先写出它；每个词元仍显示模型给出的概率。'],
  reference: ['Reference translation', '参考译文'],
  referenceHint: ['The model scores it: did the search miss it, or does the model disagree?', '由模型打分：是搜索漏掉了它，还是模型不同意？'],
  examples: ['Examples', '例句'],
  done: ['Done: {text}', '完成：{text}'],
  file: ['This file has no model behind it. To ask something else, run:', '这个文件背后没有模型。要问别的，请运行：'],
  asked: ['Text', '文字'],
  off: ['Heads off', '关闭的头'],
  link: ['Copy link with text', '复制含原文的链接'],
  empty: ['Type a sentence first.', '请先输入一个句子。'],
});

export function mountAsk(body, { store, api, session, onExplanation, announce, wait, replace }) {
  if (!api) {
    onExplanation(showRecord);
    return;
  }
  const line = { type: 'text', dir: 'auto', spellcheck: 'false' };
  const inputs = {
    to: make('select'),
    text: make('textarea', { ...line, type: null, rows: 3, maxlength: session.limits?.characters, required: true }),
    beam: make('input', { type: 'number', min: 1, max: session.limits?.beam ?? 16, step: 1, inputmode: 'numeric' }),
    penalty: make('input', { type: 'number', min: 0, max: 5, step: 'any', inputmode: 'decimal' }),
    prefix: make('input', line),
    reference: make('input', line),
  };
  const { to, text, beam, penalty, prefix, reference } = inputs;
  const problem = make('p.problem', { id: 'ask-problem', role: 'alert', hidden: true });
  text.value = fragmentText(location.hash);
  text.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) submit();
  });

  function field(key, hint) {
    const id = `ask-${key}`;
    inputs[key].id = id;
    if (hint) inputs[key].setAttribute('aria-describedby', `${id}-hint`);
    return make('div.ask-field', make('label', { for: id }, askText(key)), inputs[key],
      hint && make('p.quiet', { id: `${id}-hint` }, askText(`${key}Hint`)));
  }

  function example(sample) {
    const take = () => {
      text.value = sample;
      text.focus();
    };
    return make('li', make('button.plain.text', { onclick: take }, make('bdi', sample)));
  }

  // The inputs stay; what is written around them follows the language.
  function buildForm() {
    const searches = ['translate', 'language'].includes(session.task ?? 'translate');
    const onsubmit = (event) => {
      event.preventDefault();
      submit();
    };
    const into = to.value;
    setChildren(to, ['', ...session.targets ?? []].map((each) => make('option', { value: each }, each ? languageName(each) : askText('auto'))));
    to.value = into;
    setChildren(body, make('form.ask', { novalidate: true, onsubmit },
      field('text'),
      session.targets?.length > 1 && field('to'),
      searches && make('div.pair', field('beam'), field('penalty')),
      searches && make('details.more', { open: Boolean(prefix.value || reference.value) },
        make('summary', askText('more')), field('prefix', true), field('reference', true)),
      problem,
      make('div.row', make('button.primary', { type: 'submit' }, askText('submit')), make('button.plain', { onclick: copyLink }, askText('link'))),
      session.examples?.length > 0 && make('div.examples',
        make('h3', askText('examples')), make('ul', session.examples.map(example)))));
  }

  function fillForm({ request, source }) {
    if (!text.value || document.activeElement !== text) text.value = fragmentText(location.hash) || source.text;
    beam.value = request.beam || beam.value;
    penalty.value = request.length_penalty ?? penalty.value;
    text.lang = source.lang;
  }

  function showRecord(ex) {
    const { beam: width, length_penalty: alpha, off } = ex.request;
    const forced = ex.target.tokens.filter((_, t) => ex.steps[t]?.forced).map((token) => token.text).join('').trim();
    setChildren(body,
      termList('record', [
        [askText('asked'), make('bdi.run.small', { lang: ex.source.lang, dir: ex.source.dir }, ex.source.text)],
        [askText('beam'), width],
        [askText('penalty'), typeof alpha === 'number' && formatNumber(alpha)],
        [askText('prefix'), forced && make('bdi', { lang: ex.target.lang }, forced)],
        [askText('off'), off?.join(', ')],
      ]),
      make('p.quiet', askText('file')),
      make('code.command', { tabindex: 0 }, explainCommand(ex)));
  }

  function showProblem(words) {
    problem.textContent = words;
    problem.hidden = !words;
  }

  async function submit() {
    if (document.body.dataset.busy) return;
    if (!text.value.trim()) {
      showProblem(askText('empty'));
      text.focus();
      return;
    }
    const request = { text: text.value, off: store.get().off };
    if (to.value) request.target_language = to.value;
    if (beam.value) request.beam = Number(beam.value);
    if (penalty.value) request.length_penalty = Number(penalty.value);
    for (const key of ['prefix', 'reference']) if (inputs[key].value.trim()) request[key] = inputs[key].value;
    showProblem('');
    try {
      const ex = await wait(api.explain(request));
      store.set({ step: null, src: null, node: null, zoom: null });
      replace(ex);
      announce(askText('done', { text: ex.target.text }));
    } catch (error) {
      showProblem(error.message);
    }
  }

  function copyLink() {
    const parts = [formatFragment({ ...store.get(), e: '' }), `text=${encodeURIComponent(text.value)}`];
    copyAddress(`${location.origin}${location.pathname}#${joinTexts(parts, '&')}`, announce);
  }

  buildForm();
  onExplanation(fillForm);
  store.subscribe((state, changed) => {
    if (changed.has('lang')) buildForm();
  });
}

// The request: text, beam, length penalty, forced beginning, reference. In a file it is read only.
import { addStrings, formatNumber, translate } from './i18n.js';
import { decodeExplanation } from './data.js';
import { element } from './dom.js';
import { explainCommand } from './strip.js';
import { formatFragment, fragmentText } from './url.js';

addStrings(
  {
    'ask.text': 'Text to translate',
    'ask.submit': 'Translate',
    'ask.text@other': 'Input',
    'ask.submit@other': 'Run',
    'ask.done@other': 'Done: {text}',
    'ask.beam': 'Beam',
    'ask.penalty': 'Length penalty',
    'ask.more': 'Force a beginning, or compare a reference',
    'ask.prefix': 'The translation begins with',
    'ask.prefixHint': 'The model must write this first; each token still shows the probability the model itself gave it.',
    'ask.reference': 'Reference translation',
    'ask.referenceHint': 'The model scores it, so that you see whether the search missed it or the model disagrees.',
    'ask.examples': 'Examples',
    'ask.done': 'Translated: {text}',
    'ask.file': 'This file holds one translation and has no model behind it. To ask something else, run:',
    'ask.file@other': 'This file holds one prediction and has no model behind it. To ask something else, run:',
    'ask.asked': 'Text',
    'ask.forced': 'Forced beginning',
    'ask.off': 'Heads off',
    'ask.copy': 'Copy the command',
    'ask.link': 'Copy link with text',
    'ask.empty': 'Type a sentence first.',
  },
  {
    'ask.text': '要翻译的文字',
    'ask.submit': '翻译',
    'ask.text@other': '输入',
    'ask.submit@other': '运行',
    'ask.done@other': '完成：{text}',
    'ask.beam': '束宽',
    'ask.penalty': '长度惩罚',
    'ask.more': '指定开头，或比较参考译文',
    'ask.prefix': '译文的开头是',
    'ask.prefixHint': '模型必须先写出它；每个词元仍显示模型自己给出的概率。',
    'ask.reference': '参考译文',
    'ask.referenceHint': '由模型给它打分，看是搜索漏掉了它，还是模型不同意。',
    'ask.examples': '例句',
    'ask.done': '已翻译：{text}',
    'ask.file': '这个文件只含一次翻译，背后没有模型。要问别的，请运行：',
    'ask.file@other': '这个文件只含一次预测，背后没有模型。要问别的，请运行：',
    'ask.asked': '文字',
    'ask.forced': '指定的开头',
    'ask.off': '关闭的头',
    'ask.copy': '复制命令',
    'ask.link': '复制含原文的链接',
    'ask.empty': '请先输入一个句子。',
  },
);

class AskPanel {
  constructor(body, context) {
    this.body = body;
    this.context = context;
    this.values = { text: fragmentText(location.hash), beam: null, penalty: null, prefix: '', reference: '' };
    this.language = '';
    if (context.api) this.buildForm();
    context.onExplanation((ex) => (context.api ? this.fillForm(ex) : this.buildRecord(ex)));
    context.store.subscribe((state, changed) => {
      if (changed.has('lang') && context.api) {
        this.keep();
        this.buildForm();
      }
    });
  }

  keep() {
    for (const [key, input] of Object.entries(this.inputs)) this.values[key] = input.value;
  }

  buildForm() {
    const { session } = this.context;
    const limits = session?.limits ?? {};
    const field = (key, input, hint) => {
      input.id = `ask-${key}`;
      const label = element('label', { for: input.id }, translate(`ask.${key}`));
      if (!hint) return element('div', { class: 'ask-field' }, label, input);
      input.setAttribute('aria-describedby', `ask-${key}-hint`);
      return element('div', { class: 'ask-field' }, label, input, element('p', { class: 'quiet', id: `ask-${key}-hint` }, translate(hint)));
    };
    this.inputs = {
      text: element('textarea', { rows: 3, dir: 'auto', spellcheck: 'false', maxlength: limits.characters ?? null, required: true }),
      beam: element('input', { type: 'number', min: 1, max: limits.beam ?? 16, step: 1, inputmode: 'numeric' }),
      penalty: element('input', { type: 'number', min: 0, max: 5, step: 'any', inputmode: 'decimal' }),
      prefix: element('input', { type: 'text', dir: 'auto', spellcheck: 'false' }),
      reference: element('input', { type: 'text', dir: 'auto', spellcheck: 'false' }),
    };
    for (const [key, input] of Object.entries(this.inputs)) input.value = this.values[key] ?? '';
    this.button = element('button', { type: 'submit', class: 'primary' }, translate('ask.submit'));
    this.problem = element('p', { class: 'problem', id: 'ask-problem', role: 'alert', hidden: true });
    const examples = session?.examples ?? [];
    const searches = ['translate', 'language'].includes(session?.task ?? 'translate');
    const more = !searches ? null : element('details', { class: 'more', open: Boolean(this.values.prefix || this.values.reference) },
      element('summary', {}, translate('ask.more')),
      field('prefix', this.inputs.prefix, 'ask.prefixHint'),
      field('reference', this.inputs.reference, 'ask.referenceHint'));
    const form = element('form', { class: 'ask', novalidate: true },
      field('text', this.inputs.text),
      !searches ? null : element('div', { class: 'pair' }, field('beam', this.inputs.beam), field('penalty', this.inputs.penalty)),
      more,
      this.problem,
      element('div', { class: 'row' }, this.button,
        element('button', { type: 'button', class: 'plain', onclick: () => this.copyLink() }, translate('ask.link'))),
      examples.length ? element('div', { class: 'examples' },
        element('h3', {}, translate('ask.examples')),
        element('ul', {}, examples.map((text) => element('li', {}, element('button', {
          type: 'button',
          class: 'plain text',
          onclick: () => {
            this.inputs.text.value = text;
            this.inputs.text.focus();
          },
        }, element('bdi', {}, text)))))) : null);
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      this.submit();
    });
    this.inputs.text.addEventListener('keydown', (event) => {
      if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) this.submit();
    });
    this.body.replaceChildren(form);
  }

  fillForm(ex) {
    const request = ex.request ?? {};
    const { text, beam, penalty } = this.inputs;
    if (!text.value || document.activeElement !== text) text.value = fragmentText(location.hash) || ex.source?.text || '';
    if (request.beam) beam.value = request.beam;
    if (typeof request.length_penalty === 'number') penalty.value = request.length_penalty;
    text.lang = ex.source?.lang ?? '';
  }

  buildRecord(ex) {
    const request = ex.request ?? {};
    const fact = (key, value) => (value ? element('div', {}, element('dt', {}, translate(key)), element('dd', {}, value)) : null);
    const command = element('code', { class: 'command', tabindex: '0' }, explainCommand(ex));
    const forced = ex.target?.tokens?.filter((token, t) => ex.steps[t]?.forced).map((token) => token.text).join('').trim();
    this.body.replaceChildren(
      element('dl', { class: 'record' },
        fact('ask.asked', element('bdi', { class: 'run small', lang: ex.source.lang || null, dir: ex.source.dir }, ex.source.text)),
        fact('ask.beam', request.beam ? String(request.beam) : ''),
        fact('ask.penalty', typeof request.length_penalty === 'number' ? formatNumber(request.length_penalty) : ''),
        fact('ask.forced', forced ? element('bdi', { lang: ex.target.lang || null }, forced) : ''),
        fact('ask.off', (request.off ?? []).join(', '))),
      element('p', { class: 'quiet' }, translate('ask.file')),
      command);
  }

  showProblem(sentence) {
    this.problem.textContent = sentence;
    this.problem.hidden = !sentence;
  }

  async submit() {
    const { api, announce, replace, store } = this.context;
    const { text, beam, penalty, prefix, reference } = this.inputs;
    if (!text.value.trim()) {
      this.showProblem(translate('ask.empty'));
      text.focus();
      return;
    }
    const request = { text: text.value, off: [...store.get().off] };
    if (beam.value) request.beam = Number(beam.value);
    if (penalty.value) request.length_penalty = Number(penalty.value);
    if (prefix.value.trim()) request.prefix = prefix.value;
    if (reference.value.trim()) request.reference = reference.value;
    this.showProblem('');
    this.button.setAttribute('aria-disabled', 'true');
    this.body.setAttribute('aria-busy', 'true');
    announce(translate('page.loading'));
    try {
      const ex = decodeExplanation(await api.explain(request));
      store.set({ step: null, src: null, node: null, zoom: null });
      replace(ex);
      announce(translate('ask.done', { text: ex.target?.text ?? '' }));
    } catch (error) {
      this.showProblem(error.message);
    } finally {
      this.button.removeAttribute('aria-disabled');
      this.body.removeAttribute('aria-busy');
    }
  }

  async copyLink() {
    const state = formatFragment({ ...this.context.store.get(), e: '' });
    const text = `text=${encodeURIComponent(this.inputs.text.value)}`;
    const address = `${location.origin}${location.pathname}#${state ? `${state}&` : ''}${text}`;
    try {
      await navigator.clipboard.writeText(address);
      this.context.announce(translate('page.copied'));
    } catch {
      this.context.announce(translate('page.copyFailed'));
    }
  }
}

export function mountAsk(body, context) {
  return new AskPanel(body, context);
}

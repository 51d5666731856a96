"""Registry of the recipes: published models by name; importing it needs no torch."""

from __future__ import annotations

from dragoman.registry import Entry, Registry

TRANSFORMER = "Transformer"
VARIANTS = "Transformer variants"
RNN = "RNN"
CNN = "CNN"
DOMHAN2018 = "Domhan (2018)"
PAIRS = "Sentence pairs"
SETS = "Sets"
TAGGERS = "Taggers"
CLASSIFIERS = "Classification"
LANGUAGE = "Language models"

RECIPES = Registry(
    "recipe",
    tiny=Entry(
        "dragoman.recipes.transformer:tiny",
        "Transformer, 1.4M parameters; 10 min on 2 cores",
        family=TRANSFORMER,
    ),
    small=Entry(
        "dragoman.recipes.transformer:small",
        "Transformer, 9M parameters; about 100k pairs",
        family=TRANSFORMER,
    ),
    couplets=Entry(
        "dragoman.recipes.chinese_couplets:couplets",
        "Transformer of characters, for lines of verse",
        family=TRANSFORMER,
    ),
    vaswani2017_base=Entry(
        "dragoman.recipes.transformer:vaswani2017_base",
        "Transformer base (Vaswani et al. 2017)",
        family=TRANSFORMER,
    ),
    vaswani2017_big=Entry(
        "dragoman.recipes.transformer:vaswani2017_big",
        "Transformer big (Vaswani et al. 2017)",
        family=TRANSFORMER,
    ),
    shaw2018=Entry(
        "dragoman.recipes.transformer_variants:shaw2018",
        "Relative position keys (Shaw et al. 2018)",
        family=VARIANTS,
    ),
    dai2019=Entry(
        "dragoman.recipes.transformer_variants:dai2019",
        "Transformer-XL relative positions (Dai et al.)",
        family=VARIANTS,
    ),
    su2021=Entry(
        "dragoman.recipes.transformer_variants:su2021",
        "Rotary embeddings, RoFormer (Su et al. 2021)",
        family=VARIANTS,
    ),
    press2022=Entry(
        "dragoman.recipes.transformer_variants:press2022",
        "ALiBi position bias (Press et al. 2022)",
        family=VARIANTS,
    ),
    raffel2020=Entry(
        "dragoman.recipes.transformer_variants:raffel2020",
        "T5 layers: RMSNorm, relative bias (Raffel 2020)",
        family=VARIANTS,
    ),
    xiong2020=Entry(
        "dragoman.recipes.transformer_variants:xiong2020",
        "Pre-norm Transformer (Xiong et al. 2020)",
        family=VARIANTS,
    ),
    nguyen2019=Entry(
        "dragoman.recipes.transformer_variants:nguyen2019",
        "Low-resource: ScaleNorm, FixNorm (Nguyen 2019)",
        family=VARIANTS,
    ),
    lan2020=Entry(
        "dragoman.recipes.transformer_variants:lan2020",
        "Shared layers, as in ALBERT (Lan et al. 2020)",
        family=VARIANTS,
    ),
    fan2020=Entry(
        "dragoman.recipes.transformer_variants:fan2020",
        "LayerDrop, 12 + 6 layers (Fan et al. 2020)",
        family=VARIANTS,
    ),
    zhang2019=Entry(
        "dragoman.recipes.transformer_variants:zhang2019",
        "DS-Init, 12 + 12 layers (Zhang et al. 2019)",
        family=VARIANTS,
    ),
    shazeer2020=Entry(
        "dragoman.recipes.transformer_variants:shazeer2020",
        "Talking-heads attention (Shazeer et al. 2020)",
        family=VARIANTS,
    ),
    shazeer2020_glu=Entry(
        "dragoman.recipes.transformer_variants:shazeer2020_glu",
        "SwiGLU feed-forward networks (Shazeer 2020)",
        family=VARIANTS,
    ),
    ainslie2023=Entry(
        "dragoman.recipes.transformer_variants:ainslie2023",
        "Grouped-query attention (Ainslie et al. 2023)",
        family=VARIANTS,
    ),
    henry2020=Entry(
        "dragoman.recipes.transformer_variants:henry2020",
        "Low-resource: query-key norm (Henry et al. 2020)",
        family=VARIANTS,
    ),
    bhojanapalli2020=Entry(
        "dragoman.recipes.transformer_variants:bhojanapalli2020",
        "Wider attention heads (Bhojanapalli et al. 2020)",
        family=VARIANTS,
    ),
    vaswani2017_restricted=Entry(
        "dragoman.recipes.transformer_variants:vaswani2017_restricted",
        "Sliding-window self-attention (Vaswani, sec. 4)",
        family=VARIANTS,
    ),
    dong2019=Entry(
        "dragoman.recipes.transformer_variants:dong2019",
        "UniLM: one stack, prefix mask (Dong et al. 2019)",
        family=TRANSFORMER,
    ),
    kitaev2020=Entry(
        "dragoman.recipes.reformer:kitaev2020",
        "Reformer: LSH attention, reversible; documents",
        family=TRANSFORMER,
    ),
    kitaev2020_wmt=Entry(
        "dragoman.recipes.reformer:kitaev2020_wmt",
        "Reformer for WMT: reversible, full attention",
        family=TRANSFORMER,
    ),
    sutskever2014=Entry(
        "dragoman.recipes.rnn:sutskever2014",
        "LSTM without attention, reversed source",
        family=RNN,
    ),
    bahdanau2015=Entry(
        "dragoman.recipes.rnn:bahdanau2015",
        "RNNsearch: GRU with additive attention",
        family=RNN,
    ),
    luong2015_general=Entry(
        "dragoman.recipes.rnn:luong2015_general",
        "LSTM, general score, input feeding (Luong 2015)",
        family=RNN,
    ),
    luong2015_dot=Entry(
        "dragoman.recipes.rnn:luong2015_dot", "LSTM, dot score (Luong et al. 2015)", family=RNN
    ),
    luong2015_concat=Entry(
        "dragoman.recipes.rnn:luong2015_concat",
        "LSTM, concat (additive) score (Luong et al. 2015)",
        family=RNN,
    ),
    luong2015_location=Entry(
        "dragoman.recipes.rnn:luong2015_location",
        "LSTM, location score (Luong et al. 2015)",
        family=RNN,
    ),
    luong2015_local_m=Entry(
        "dragoman.recipes.rnn:luong2015_local_m",
        "LSTM, local-m attention (Luong et al. 2015)",
        family=RNN,
    ),
    luong2015_local_p=Entry(
        "dragoman.recipes.rnn:luong2015_local_p",
        "LSTM, local-p attention (Luong et al. 2015)",
        family=RNN,
    ),
    wu2016=Entry(
        "dragoman.recipes.rnn:wu2016",
        "GNMT: 8-layer LSTM (Wu et al. 2016)",
        family=RNN,
    ),
    chorowski2015=Entry(
        "dragoman.recipes.rnn_attention_variants:chorowski2015",
        "Location-sensitive attention, characters",
        family=RNN,
    ),
    raffel2017=Entry(
        "dragoman.recipes.rnn_attention_variants:raffel2017",
        "Monotonic attention (Raffel et al. 2017)",
        family=RNN,
    ),
    chiu2018=Entry(
        "dragoman.recipes.rnn_attention_variants:chiu2018",
        "MoChA: monotonic chunkwise attention",
        family=RNN,
    ),
    xu2015=Entry(
        "dragoman.recipes.rnn_attention_variants:xu2015",
        "Hard attention with REINFORCE (Xu et al. 2015)",
        family=RNN,
    ),
    see2017=Entry(
        "dragoman.recipes.rnn_attention_variants:see2017",
        "Coverage attention and loss (See et al. 2017)",
        family=RNN,
    ),
    gehring2017=Entry(
        "dragoman.recipes.convs2s:gehring2017",
        "ConvS2S: gated CNN with attention in each layer",
        family=CNN,
    ),
    gehring2017_wmt=Entry(
        "dragoman.recipes.convs2s:gehring2017_wmt",
        "ConvS2S for WMT: 15 layers, 512 to 2048 channels",
        family=CNN,
    ),
    domhan2018_transformer=Entry(
        "dragoman.recipes.domhan2018:domhan2018_transformer",
        "Pre-norm Transformer, 6 + 6 layers (baseline)",
        family=DOMHAN2018,
    ),
    domhan2018_rnn=Entry(
        "dragoman.recipes.domhan2018:domhan2018_rnn",
        "Residual LSTM, single-head attention",
        family=DOMHAN2018,
    ),
    domhan2018_rnn_mh=Entry(
        "dragoman.recipes.domhan2018:domhan2018_rnn_mh",
        "rnn + multi-head attention",
        family=DOMHAN2018,
    ),
    domhan2018_rnn_pos=Entry(
        "dragoman.recipes.domhan2018:domhan2018_rnn_pos",
        "rnn_mh + position embeddings",
        family=DOMHAN2018,
    ),
    domhan2018_rnn_norm=Entry(
        "dragoman.recipes.domhan2018:domhan2018_rnn_norm",
        "rnn_pos + layer norm",
        family=DOMHAN2018,
    ),
    domhan2018_rnn_multi_att_1h=Entry(
        "dragoman.recipes.domhan2018:domhan2018_rnn_multi_att_1h",
        "rnn_norm + single-head attention in each layer",
        family=DOMHAN2018,
    ),
    domhan2018_rnn_multi_att=Entry(
        "dragoman.recipes.domhan2018:domhan2018_rnn_multi_att",
        "rnn_norm + multi-head attention in each layer",
        family=DOMHAN2018,
    ),
    domhan2018_rnn_ff=Entry(
        "dragoman.recipes.domhan2018:domhan2018_rnn_ff",
        "rnn_multi_att + feed-forward networks",
        family=DOMHAN2018,
    ),
    domhan2018_cnn=Entry(
        "dragoman.recipes.domhan2018:domhan2018_cnn",
        "Residual CNN, single-head attention per layer",
        family=DOMHAN2018,
    ),
    domhan2018_cnn_norm=Entry(
        "dragoman.recipes.domhan2018:domhan2018_cnn_norm",
        "cnn + layer norm",
        family=DOMHAN2018,
    ),
    domhan2018_cnn_mh=Entry(
        "dragoman.recipes.domhan2018:domhan2018_cnn_mh",
        "cnn_norm + multi-head attention",
        family=DOMHAN2018,
    ),
    domhan2018_cnn_ff=Entry(
        "dragoman.recipes.domhan2018:domhan2018_cnn_ff",
        "cnn_mh + feed-forward networks",
        family=DOMHAN2018,
    ),
    domhan2018_self_rnn=Entry(
        "dragoman.recipes.domhan2018:domhan2018_self_rnn",
        "Transformer encoder, LSTM decoder",
        family=DOMHAN2018,
    ),
    domhan2018_self_cnn=Entry(
        "dragoman.recipes.domhan2018:domhan2018_self_cnn",
        "Transformer encoder, CNN decoder",
        family=DOMHAN2018,
    ),
    domhan2018_rnn_self=Entry(
        "dragoman.recipes.domhan2018:domhan2018_rnn_self",
        "LSTM encoder, Transformer decoder",
        family=DOMHAN2018,
    ),
    domhan2018_cnn_self=Entry(
        "dragoman.recipes.domhan2018:domhan2018_cnn_self",
        "CNN encoder, Transformer decoder",
        family=DOMHAN2018,
    ),
    domhan2018_self_combined=Entry(
        "dragoman.recipes.domhan2018:domhan2018_self_combined",
        "Transformer encoder, mixed decoder",
        family=DOMHAN2018,
    ),
    domhan2018_self_none=Entry(
        "dragoman.recipes.domhan2018:domhan2018_self_none",
        "Transformer encoder, no self-attention in decoder",
        family=DOMHAN2018,
    ),
    domhan2018_none_self=Entry(
        "dragoman.recipes.domhan2018:domhan2018_none_self",
        "Feed-forward encoder, Transformer decoder",
        family=DOMHAN2018,
    ),
    chen2017=Entry(
        "dragoman.recipes.sentence_pair_classification:chen2017",
        "ESIM: BiLSTM, co-attention (Chen et al. 2017)",
        family=PAIRS,
        task="pairs",
    ),
    parikh2016=Entry(
        "dragoman.recipes.sentence_pair_classification:parikh2016",
        "Decomposable attention (Parikh et al. 2016)",
        family=PAIRS,
        task="pairs",
    ),
    conneau2017=Entry(
        "dragoman.recipes.sentence_pair_classification:conneau2017",
        "InferSent, no attention (Conneau et al. 2017)",
        family=PAIRS,
        task="pairs",
    ),
    rocktaschel2016=Entry(
        "dragoman.recipes.sentence_pair_classification:rocktaschel2016",
        "Pair as one sequence (Rocktäschel et al. 2016)",
        family=PAIRS,
        task="pairs",
    ),
    lee2019=Entry(
        "dragoman.recipes.unordered_set_input_tasks:lee2019",
        "Set Transformer for your sets (Lee et al. 2019)",
        family=SETS,
        task="sets",
    ),
    lee2019_isab=Entry(
        "dragoman.recipes.unordered_set_input_tasks:lee2019_isab",
        "Set Transformer for large sets (Lee et al. 2019)",
        family=SETS,
        task="sets",
    ),
    lee2019_max=Entry(
        "dragoman.recipes.unordered_set_input_tasks:lee2019_max",
        "Maximum of numbers (Lee et al. 2019)",
        family=SETS,
        task="sets",
    ),
    lee2019_unique=Entry(
        "dragoman.recipes.unordered_set_input_tasks:lee2019_unique",
        "Different characters (Lee et al. 2019)",
        family=SETS,
        task="sets",
    ),
    lee2019_clustering=Entry(
        "dragoman.recipes.unordered_set_input_tasks:lee2019_clustering",
        "Amortized clustering (Lee et al. 2019)",
        family=SETS,
        task="sets",
    ),
    zaheer2017_mean=Entry(
        "dragoman.recipes.unordered_set_input_tasks:zaheer2017_mean",
        "Deep Sets, mean pooling (Zaheer et al. 2017)",
        family=SETS,
        task="sets",
    ),
    zaheer2017_sum=Entry(
        "dragoman.recipes.unordered_set_input_tasks:zaheer2017_sum",
        "Deep Sets, sum pooling (Zaheer et al. 2017)",
        family=SETS,
        task="sets",
    ),
    zaheer2017_max=Entry(
        "dragoman.recipes.unordered_set_input_tasks:zaheer2017_max",
        "Deep Sets, max pooling (Zaheer et al. 2017)",
        family=SETS,
        task="sets",
    ),
    # The first recipe of a task is its default.
    lample2016=Entry(
        "dragoman.recipes.tagging:lample2016",
        "BiLSTM-CRF, character LSTM (Lample et al. 2016)",
        family=TAGGERS,
        task="tag",
    ),
    ma2016=Entry(
        "dragoman.recipes.tagging:ma2016",
        "BiLSTM-CRF, character CNN (Ma and Hovy 2016)",
        family=TAGGERS,
        task="tag",
    ),
    huang2015=Entry(
        "dragoman.recipes.tagging:huang2015",
        "BiLSTM-CRF, spelling features (Huang et al. 2015)",
        family=TAGGERS,
        task="tag",
    ),
    plank2016=Entry(
        "dragoman.recipes.tagging:plank2016",
        "POS tags, auxiliary loss (Plank et al. 2016)",
        family=TAGGERS,
        task="tag",
    ),
    vaswani2017_tagger=Entry(
        "dragoman.recipes.tagging:vaswani2017_tagger",
        "Transformer tagger with a CRF",
        family=TAGGERS,
        task="tag",
    ),
    wang2012=Entry(
        "dragoman.recipes.classification:wang2012",
        "CNN, BiLSTM, NB n-grams (Wang, Manning 2012)",
        family=CLASSIFIERS,
        task="classify",
    ),
    yang2016=Entry(
        "dragoman.recipes.classification:yang2016",
        "HAN: words, sentences (Yang et al. 2016)",
        family=CLASSIFIERS,
        task="classify",
    ),
    kim2014=Entry(
        "dragoman.recipes.classification:kim2014",
        "TextCNN: filters, max-pooling (Kim 2014)",
        family=CLASSIFIERS,
        task="classify",
    ),
    johnson2015=Entry(
        "dragoman.recipes.classification:johnson2015",
        "One-hot CNN, NB n-grams (Johnson, Zhang 2015)",
        family=CLASSIFIERS,
        task="classify",
    ),
    zhou2016=Entry(
        "dragoman.recipes.classification:zhou2016",
        "BiLSTM, attention pooling (Zhou et al. 2016)",
        family=CLASSIFIERS,
        task="classify",
    ),
    li2002=Entry(
        "dragoman.recipes.classification:li2002",
        "Question types, two levels (Li and Roth 2002)",
        family=CLASSIFIERS,
        task="classify",
    ),
    lin2017=Entry(
        "dragoman.recipes.classification:lin2017",
        "Structured self-attention (Lin et al. 2017)",
        family=CLASSIFIERS,
        task="classify",
    ),
    bai2018=Entry(
        "dragoman.recipes.classification:bai2018",
        "TCN: causal dilated CNN (Bai et al. 2018)",
        family=CLASSIFIERS,
        task="classify",
    ),
    yu2016=Entry(
        "dragoman.recipes.classification:yu2016",
        "Dilated CNN (Yu and Koltun 2016)",
        family=CLASSIFIERS,
        task="classify",
    ),
    vaswani2017_classifier=Entry(
        "dragoman.recipes.classification:vaswani2017_classifier",
        "Transformer encoder (Vaswani et al. 2017)",
        family=CLASSIFIERS,
        task="classify",
    ),
    adhikari2019=Entry(
        "dragoman.recipes.classification:adhikari2019",
        "Regularized BiLSTM (Adhikari et al. 2019)",
        family=CLASSIFIERS,
        task="classify",
    ),
    mullenbach2018=Entry(
        "dragoman.recipes.classification:mullenbach2018",
        "One attention per label (Mullenbach 2018)",
        family=CLASSIFIERS,
        task="classify",
    ),
    hu2018=Entry(
        "dragoman.recipes.classification:hu2018",
        "Attribute attention, few-shot (Hu et al. 2018)",
        family=CLASSIFIERS,
        task="classify",
    ),
    dai2019_lm=Entry(
        "dragoman.recipes.language_models:dai2019_lm",
        "Transformer-XL on words (Dai et al. 2019)",
        family=LANGUAGE,
        task="language",
    ),
    dai2019_bytes=Entry(
        "dragoman.recipes.language_models:dai2019_bytes",
        "Transformer-XL on bytes (Dai et al. 2019)",
        family=LANGUAGE,
        task="language",
    ),
    merity2018=Entry(
        "dragoman.recipes.language_models:merity2018",
        "AWD-LSTM on words (Merity et al. 2018)",
        family=LANGUAGE,
        task="language",
    ),
    vaswani2017_lm=Entry(
        "dragoman.recipes.language_models:vaswani2017_lm",
        "Plain Transformer on words; equal context",
        family=LANGUAGE,
        task="language",
    ),
    vaswani2017_bytes=Entry(
        "dragoman.recipes.language_models:vaswani2017_bytes",
        "Plain Transformer on bytes; equal context",
        family=LANGUAGE,
        task="language",
    ),
    radford2018=Entry(
        "dragoman.recipes.language_models:radford2018",
        "GPT on subwords (Radford et al. 2018)",
        family=LANGUAGE,
        task="language",
    ),
    devlin2019=Entry(
        "dragoman.recipes.masked_language_models:devlin2019",
        "BERT: masked tokens (Devlin et al. 2019)",
        family=LANGUAGE,
        task="language",
    ),
    yang2019=Entry(
        "dragoman.recipes.masked_language_models:yang2019",
        "XLNet: a random order (Yang et al. 2019)",
        family=LANGUAGE,
        task="language",
    ),
    lan2020_lm=Entry(
        "dragoman.recipes.masked_language_models:lan2020_lm",
        "ALBERT: shared layers, sentence order (2020)",
        family=LANGUAGE,
        task="language",
    ),
    kitaev2020_lm=Entry(
        "dragoman.recipes.language_models:kitaev2020_lm",
        "Reformer on bytes (Kitaev et al. 2020)",
        family=LANGUAGE,
        task="language",
    ),
)


def recipes_of(task: str) -> tuple[str, ...]:
    """Return the names of a task's recipes, such as "translate"."""
    return tuple(name for name, entry in RECIPES.items() if entry.task == task)

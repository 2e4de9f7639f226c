//! Writes the report page of an invented checkpoint, to look at and to test the page with.
//!
//! ```text
//! cargo run -p reshard-cli --example sample_report -- OUT.html [small|big|many|hostile|empty] [--serve]
//! ```
//!
//! `small` is a language model with its optimizer on eight ranks, compared with a later step; `big` has over 10,000 tensors on
//! 128 ranks; `many` has 20,000 that are mostly alike; `hostile` has keys that try to become markup; `empty` has nothing. `--serve` shows it live and prints the address.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::Arc;

use reshard_cli::report::*;

struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as f64) / f64::from(1_u32 << 31)
    }

    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.next()).sum::<f64>() - 6.0
    }
}

fn stats(seed: u64, spread: f64) -> Stats {
    let mut random = Random(seed);
    let values: Vec<f64> = (0..20_000).map(|_| random.normal() * spread).collect();
    let (low, high) = values.iter().fold((f64::MAX, f64::MIN), |(l, h), &v| (l.min(v), h.max(v)));
    let mut counts = vec![0; 48];
    for value in &values {
        let bin = ((value - low) / (high - low) * 48.0) as usize;
        counts[bin.min(47)] += 1;
    }
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let var = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / values.len() as f64;
    let mut magnitudes = vec![0; 40];
    for exponent in values.iter().map(|value| value.abs().log2().floor() as i32 + 34) {
        magnitudes[exponent.clamp(0, 39) as usize] += 1;
    }
    let mut sorted = values.clone();
    sorted.sort_by(f64::total_cmp);
    let percentiles = [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99].map(|share| sorted[(share * 19_999.0) as usize]).to_vec();
    Stats {
        min: Some(low),
        max: Some(high),
        mean: Some(mean),
        std: Some(var.sqrt()),
        rms: Some((var + mean * mean).sqrt()),
        count: values.len() as u64,
        zeros: seed % 40,
        percentiles,
        magnitudes: Some(Magnitudes { low: -34, counts: magnitudes }),
        histogram: Some(Histogram { low, high, counts }),
        ..Stats::default()
    }
}

/// Numbers without a distribution, of which a page can hold very many.
fn few_words(rms: f64, count: u64) -> Stats {
    let (min, max, mean, std) = (Some(-4.0 * rms), Some(4.0 * rms), Some(0.0), Some(rms));
    Stats { min, max, mean, std, rms: Some(rms), count, ..Stats::default() }
}

fn check(state: CheckState, note: &str) -> Check {
    Check::new(state, note)
}

/// A way to cut a tensor: so many parts in each dimension.
fn add(builder: &mut ReportBuilder, key: &str, dtype: &str, shape: &[u64], parts: &[u64], files: &[u32]) -> u32 {
    let bytes = shape.iter().product::<u64>() * if dtype == "bfloat16" { 2 } else { 4 };
    let mut boxes: Vec<(Vec<u64>, Vec<u64>)> = vec![(Vec::new(), Vec::new())];
    for (&size, &parts) in shape.iter().zip(parts) {
        let step = size.div_ceil(parts).max(1);
        boxes = boxes
            .into_iter()
            .flat_map(|(offsets, sizes)| {
                (0..parts).map(move |part| {
                    let start = (part * step).min(size);
                    let end = (start + step).min(size);
                    ([offsets.as_slice(), &[start]].concat(), [sizes.as_slice(), &[end - start]].concat())
                })
            })
            .collect();
    }
    put(builder, key, dtype, shape, bytes, &boxes, files)
}

fn put(
    builder: &mut ReportBuilder,
    key: &str,
    dtype: &str,
    shape: &[u64],
    bytes: u64,
    boxes: &[(Vec<u64>, Vec<u64>)],
    files: &[u32],
) -> u32 {
    let chunks: Vec<ChunkInput<'_>> = boxes
        .iter()
        .enumerate()
        .map(|(i, (offsets, sizes))| ChunkInput {
            offsets,
            sizes,
            file: files[i % files.len()],
            location: Some((4096 + i as u64 * 65_536, sizes.iter().product::<u64>() * 4 + 640)),
        })
        .collect();
    builder.tensor(TensorInput { key, dtype, shape, bytes, chunks: &chunks })
}

fn small() -> ReportData {
    let mut builder = ReportBuilder::new(Checkpoint {
        name: "checkpoints/step-48000".to_owned(),
        location: "s3://training/runs/llama-moe-7b/checkpoints/step-48000".to_owned(),
        format: "DCP".to_owned(),
        writer: Some("PyTorch 2.13, FSDP2 with tensor parallelism".to_owned()),
        saved: Some("2026-11-14 22:07 UTC".to_owned()),
        step: Some(48_000),
        health: Health::of(
            Checks {
                structure: check(CheckState::Fine, "every element is stored exactly once, all files are there and long enough"),
                checksums: check(CheckState::Unchecked, "not compared; --verify compares them"),
                numbers: check(CheckState::Bad, "1 nan, 1 zero-weight"),
            },
            vec![
                Finding {
                    text: "nan: 3 of 4194304 elements".to_owned(),
                    bad: true,
                    rule: Some("nan".to_owned()),
                    key: Some("model.layers.17.attention.wk.weight".to_owned()),
                    ..Finding::default()
                },
                Finding {
                    text: "zero-weight: all 16777216 elements".to_owned(),
                    rule: Some("zero-weight".to_owned()),
                    key: Some("model.layers.9.attention.wo.weight".to_owned()),
                    ..Finding::default()
                },
            ],
        ),
        facts: vec![("Layout".to_owned(), "mesh 4 × 2, FSDP along dim 0, tensor parallel along dim 1".to_owned())],
    });
    let mut random = Random(7);
    let ranks: Vec<u32> = (0..8)
        .map(|rank| {
            let bytes = 11_100_000_000 + (random.next() * 900_000_000.0) as u64;
            builder.file(format!("__{rank}_0.distcp"), bytes, Some(rank))
        })
        .collect();
    let mut params: Vec<(String, Vec<u64>, Vec<u64>)> = vec![
        ("tok_embeddings.weight".to_owned(), vec![128_256, 4096], vec![4, 2]),
        ("norm.weight".to_owned(), vec![4096], vec![8]),
        ("output.weight".to_owned(), vec![128_256, 4096], vec![4, 2]),
    ];
    for layer in 0..24 {
        for (name, shape, parts) in [
            ("attention.wq.weight", vec![4096, 4096], vec![4, 2]),
            ("attention.wk.weight", vec![1024, 4096], vec![4, 2]),
            ("attention.wv.weight", vec![1024, 4096], vec![4, 2]),
            ("attention.wo.weight", vec![4096, 4096], vec![8, 1]),
            ("feed_forward.experts.w1", vec![8, 4096, 1792], vec![4, 1, 2]),
            ("feed_forward.experts.w2", vec![8, 1792, 4096], vec![2, 2, 2]),
            ("feed_forward.router.gate", vec![8, 4096], vec![1, 1]),
            ("attention_norm.weight", vec![4096], vec![8]),
            ("ffn_norm.weight", vec![4096], vec![8]),
        ] {
            params.push((format!("layers.{layer}.{name}"), shape, parts));
        }
    }
    let mut changed = Vec::new();
    let other_check = Some(check(CheckState::Bad, "2 nan, 1 zero-weight"));
    let mut numbers = Numbers { other_check, ..Numbers::default() };
    let mut slots: BTreeMap<(bool, &str), (u64, u64)> = BTreeMap::new();
    for (n, (name, shape, parts)) in params.iter().enumerate() {
        let number = add(&mut builder, &format!("model.{name}"), "bfloat16", shape, parts, &ranks);
        let elements: u64 = shape.iter().product();
        // Deeper layers spread a little more, as they do.
        let mut of_weights = stats(n as u64, 0.015 + 0.0006 * (n / 9) as f64);
        numbers.other.insert(number, stats(n as u64 + 500, 0.02));
        if name == "layers.17.attention.wk.weight" {
            of_weights = Stats { nans: 3, infs: 1, ..of_weights };
            numbers.flags.insert(number, Flag { bad: true, rules: vec!["nan".to_owned(), "inf".to_owned()] });
        } else if name == "layers.9.attention.wo.weight" {
            of_weights =
                Stats { zeros: elements, count: elements, rms: Some(0.0), min: Some(0.0), max: Some(0.0), ..Stats::default() };
            numbers.flags.insert(number, Flag { bad: false, rules: vec!["zero-weight".to_owned()] });
        }
        if n == 40 {
            numbers.flags.insert(number, Flag { bad: false, rules: vec!["large-update".to_owned()] });
        }
        numbers.stats.insert(number, of_weights);
        numbers.updates.insert(number, if n == 40 { 0.3 } else { 1e-4 * (1.0 + 9.0 * random.next()) });
        if n % 5 != 4 {
            let size = 10_f64.powf(-1.0 - 4.0 * random.next());
            changed.push(Changed {
                tensor: number,
                dtype: (n == 2).then(|| "float32".to_owned()),
                shape: (n == 0).then(|| vec![128_512, 4096]),
                max_abs: (n != 0).then_some(size * 0.02),
                mean_abs: (n != 0).then_some(size * 0.002),
                max_rel: (n != 0).then_some(size),
                mean_rel: (n != 0).then_some(size * 0.1),
                moved: (n != 0).then_some(size * 0.05),
                cosine: (n != 0).then_some(1.0 - size * 0.001),
                newly_bad: if n == 60 { 12 } else { 0 },
                newly_zero: n == 70,
                first: (n != 0).then(|| vec![0; shape.len()]),
            });
        }
        for slot in ["exp_avg", "exp_avg_sq", "step"] {
            let key = format!("optim.state.{name}.{slot}");
            let elements = if slot == "step" { 1 } else { shape.iter().product() };
            let moment = if slot == "step" {
                add(&mut builder, &key, "float32", &[], &[], &ranks[..1])
            } else {
                add(&mut builder, &key, "float32", shape, parts, &ranks)
            };
            let rms = match slot {
                "step" => 48_000.0,
                "exp_avg" => 1e-5 * (1.0 + random.next()),
                _ => 1e-9 * (1.0 + random.next()),
            };
            numbers.stats.insert(moment, few_words(rms, elements));
            let sum = slots.entry((name.contains("norm"), slot)).or_default();
            *sum = (sum.0 + 1, sum.1 + elements * 4);
        }
    }
    // A flat parameter's shard: three boxes a rank, no grid; and one with a hole.
    let row = |r: u64, from: u64, rows: u64, cols: u64| (vec![r, from], vec![rows, cols]);
    let flat = [
        row(0, 0, 5, 512),
        row(5, 0, 1, 200),
        row(5, 200, 1, 312),
        row(6, 0, 7, 512),
        row(13, 0, 1, 64),
        row(13, 64, 1, 448),
        row(14, 0, 2, 512),
    ];
    put(&mut builder, "model.adapters.flat_shard", "float32", &[16, 512], 32_768, &flat, &[0, 0, 1, 1, 1, 2, 2]);
    // Six rows over four ranks: the last one got none.
    add(&mut builder, "model.adapters.empty_shard", "float32", &[6, 512], &[4, 1], &ranks[..4]);
    put(&mut builder, "model.adapters.with_a_gap", "float32", &[16, 512], 32_768, &flat[..4], &[0, 0, 1, 1]);

    let mut groups: Vec<ParamGroup> = Vec::new();
    for (norms, name, decay) in [(false, "0", "0.1"), (true, "1", "0.0")] {
        let slots: Vec<Slot> = slots
            .iter()
            .filter(|((of, _), _)| *of == norms)
            .map(|((_, slot), (tensors, bytes))| Slot {
                name: (*slot).to_owned(),
                tensors: *tensors,
                bytes: *bytes,
                dtypes: vec!["float32".to_owned()],
            })
            .collect();
        groups.push(ParamGroup {
            name: name.to_owned(),
            params: slots.first().map_or(0, |slot| slot.tensors),
            options: [("lr", "0.0003"), ("betas", "(0.9, 0.95)"), ("eps", "1e-08"), ("weight_decay", decay), ("fused", "True")]
                .map(|(option, text)| (option.to_owned(), text.to_owned()))
                .to_vec(),
            slots,
        });
    }
    builder.optimizer(Optimizer { name: Some("AdamW".to_owned()), root: "optim.".to_owned(), groups });
    builder.numbers(numbers);
    for (key, kind, text) in [
        ("step", "int", "48000"),
        ("tokens_seen", "int", "201326592000"),
        ("lr_scheduler.last_epoch", "int", "48000"),
        ("config.rope_theta", "float", "500000.0"),
    ] {
        builder.value(PlainValue { key: key.to_owned(), kind: kind.to_owned(), text: text.to_owned() });
    }
    builder.diff(Diff {
        name_a: "step-48000".to_owned(),
        name_b: "step-49000".to_owned(),
        location: "s3://training/runs/llama-moe-7b/checkpoints/step-49000".to_owned(),
        bytes: 1 << 36,
        tensors: 870,
        values_compared: true,
        tolerance: Some(1e-6),
        changed,
        only_a: vec![8, 9],
        only_b: vec![OtherTensor {
            key: "model.adapters.lora_a".to_owned(),
            dtype: "bfloat16".to_owned(),
            shape: vec![16, 4096],
            bytes: 131_072,
        }],
        plain: vec![ChangedValue { key: "step".to_owned(), a: Some("48000".to_owned()), b: Some("49000".to_owned()) }],
    });
    builder.finish()
}

fn big() -> ReportData {
    let mut builder = ReportBuilder::new(Checkpoint {
        name: "big".to_owned(),
        location: "/checkpoints/big".to_owned(),
        format: "DCP".to_owned(),
        health: Health::of(
            Checks { structure: check(CheckState::Warning, "2 files are larger than their records need"), ..Checks::default() },
            (0..2)
                .map(|n| Finding {
                    text: "The file ends with bytes that no record uses.".to_owned(),
                    file: Some(format!("__{n}_0.distcp")),
                    offset: Some(1 << 33),
                    ..Finding::default()
                })
                .collect(),
        ),
        ..Checkpoint::default()
    });
    let mut random = Random(3);
    let files: Vec<u32> = (0..256)
        .map(|n| {
            let bytes = 3_000_000_000 + (random.next() * 600_000_000.0) as u64;
            builder.file(format!("__{}_{}.distcp", n / 2, n % 2), bytes, Some(n / 2))
        })
        .collect();
    for layer in 0..126 {
        for (name, shape, parts) in [
            ("attn.q_proj.weight", [16_384_u64, 16_384], [64, 1]),
            ("attn.k_proj.weight", [1024, 16_384], [64, 1]),
            ("attn.v_proj.weight", [1024, 16_384], [64, 1]),
            ("attn.o_proj.weight", [16_384, 16_384], [64, 2]),
            ("mlp.gate_proj.weight", [53_248, 16_384], [128, 1]),
            ("mlp.up_proj.weight", [53_248, 16_384], [16, 8]),
            ("mlp.down_proj.weight", [16_384, 53_248], [128, 1]),
            ("input_norm.weight", [16_384, 1], [64, 1]),
            ("post_norm.weight", [16_384, 1], [64, 1]),
        ] {
            let even: Vec<u32> = files.iter().copied().step_by(2).collect();
            let odd: Vec<u32> = files.iter().copied().skip(1).step_by(2).collect();
            for tensor in 0..2 {
                let layer = layer + 126 * tensor;
                add(&mut builder, &format!("model.layers.{layer}.{name}"), "bfloat16", &shape, &parts, &even);
                for slot in ["exp_avg", "exp_avg_sq", "master", "max_exp_avg_sq"] {
                    add(&mut builder, &format!("optim.state.layers.{layer}.{name}.{slot}"), "float32", &shape, &parts, &odd);
                }
            }
        }
    }
    builder.finish()
}

/// Twenty thousand keys: two thousand experts that are alike, and their moments.
fn many() -> ReportData {
    let mut builder = ReportBuilder::new(Checkpoint {
        name: "experts/step-7".to_owned(),
        location: "/runs/experts/step-7".to_owned(),
        format: "DCP".to_owned(),
        health: Health::of(
            Checks {
                structure: check(CheckState::Fine, "every element is stored exactly once, all files are there and long enough"),
                checksums: check(CheckState::Fine, "4 checksums compared"),
                numbers: check(CheckState::Fine, "no rule is broken in 20,002 tensors"),
            },
            Vec::new(),
        ),
        ..Checkpoint::default()
    });
    let file = builder.file("__0_0.distcp", 1 << 40, Some(0));
    let mut numbers = Numbers::default();
    let mut random = Random(9);
    for name in ["embed.weight", "lm_head.weight"] {
        let number = add(&mut builder, name, "bfloat16", &[32_000, 1024], &[1, 1], &[file]);
        numbers.stats.insert(number, few_words(0.02, 32_000 * 1024));
    }
    for expert in 0..2000 {
        for (name, dtype) in
            [("gate", "bfloat16"), ("up", "bfloat16"), ("down", "bfloat16"), ("norm", "float32"), ("bias", "float32")]
        {
            for before in ["model.experts", "optim.state.experts"] {
                let number = add(&mut builder, &format!("{before}.{expert}.{name}.weight"), dtype, &[64, 256], &[1, 1], &[file]);
                numbers.stats.insert(number, few_words(0.01 + 0.02 * random.next(), 64 * 256));
            }
        }
    }
    builder.numbers(numbers);
    builder.finish()
}

const HOSTILE: [&str; 9] = [
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<!--<script>",
    "a.\u{2028}b.\u{2029}c",
    "javascript:document.title='owned'",
    "__proto__.polluted.constructor",
    "'\"><svg onload=document.title='owned'>",
    "{{script}}${document.title='owned'}",
    "",
];

fn hostile() -> ReportData {
    let mut builder = ReportBuilder::new(Checkpoint {
        name: HOSTILE[0].to_owned(),
        location: HOSTILE[1].to_owned(),
        format: HOSTILE[6].to_owned(),
        writer: Some(HOSTILE[1].to_owned()),
        health: Health::of(
            Checks {
                structure: check(CheckState::Bad, HOSTILE[1]),
                checksums: check(CheckState::Warning, HOSTILE[0]),
                numbers: check(CheckState::Bad, HOSTILE[6]),
            },
            HOSTILE
                .iter()
                .map(|key| Finding {
                    text: (*key).to_owned(),
                    bad: true,
                    rule: Some((*key).to_owned()),
                    key: Some((*key).to_owned()),
                    file: Some((*key).to_owned()),
                    offset: Some(u64::MAX),
                })
                .collect(),
        ),
        ..Checkpoint::default()
    });
    let file = builder.file(HOSTILE[1], u64::MAX, None);
    let mut numbers = Numbers::default();
    for (n, key) in HOSTILE.iter().enumerate() {
        let number = add(&mut builder, key, HOSTILE[n % 8], &[4, 4], &[2, 2], &[file]);
        numbers.stats.insert(number, Stats { nans: u64::MAX, ..stats(n as u64, 1e30) });
        numbers.flags.insert(number, Flag { bad: true, rules: vec![(*key).to_owned()] });
        numbers.other.insert(number, few_words(1e-30, u64::MAX));
        numbers.updates.insert(number, 1e300);
        builder.value(PlainValue { key: (*key).to_owned(), kind: (*key).to_owned(), text: (*key).to_owned() });
    }
    add(&mut builder, &"a.".repeat(50_000), "float32", &[u64::from(u32::MAX), 2], &[1, 1], &[file]);
    put(&mut builder, "no.chunks", "float32", &[3], 12, &[], &[file]);
    builder.numbers(numbers);
    let slots =
        vec![Slot { name: HOSTILE[0].to_owned(), tensors: u64::MAX, bytes: u64::MAX, dtypes: vec![HOSTILE[1].to_owned()] }];
    let options = vec![(HOSTILE[0].to_owned(), HOSTILE[1].to_owned())];
    let groups = vec![ParamGroup { name: HOSTILE[6].to_owned(), params: u64::MAX, options, slots }];
    builder.optimizer(Optimizer { name: Some(HOSTILE[1].to_owned()), root: HOSTILE[0].to_owned(), groups });
    builder.diff(Diff {
        name_a: HOSTILE[0].to_owned(),
        name_b: HOSTILE[1].to_owned(),
        location: HOSTILE[6].to_owned(),
        values_compared: true,
        changed: vec![Changed { tensor: 0, dtype: Some(HOSTILE[1].to_owned()), newly_bad: u64::MAX, ..Changed::default() }],
        only_b: vec![OtherTensor { key: HOSTILE[6].to_owned(), dtype: HOSTILE[0].to_owned(), shape: vec![u64::MAX], bytes: 1 }],
        ..Diff::default()
    });
    put(&mut builder, "zero.elements", "float32", &[0, 3], 0, &[(vec![0, 0], vec![0, 3])], &[file]);
    builder.finish()
}

struct Invented;

impl LiveSource for Invented {
    fn tensor(&self, key: &str) -> Result<TensorDetail, String> {
        if key.ends_with("gate") {
            return Err(format!("cannot read {key}: <b>the file is cut short</b>"));
        }
        let mut random = Random(key.len() as u64);
        Ok(TensorDetail {
            key: key.to_owned(),
            stats: Some(Stats { nans: 3, ..stats(key.len() as u64, 0.5) }),
            sample: Some(Sample {
                slice: "[:6, :6]".to_owned(),
                rows: (0..6)
                    .map(|r| {
                        (0..6)
                            .map(|c| {
                                if r == 2 && c == 3 {
                                    SampleValue::Text("nan".to_owned())
                                } else {
                                    SampleValue::Number(random.normal())
                                }
                            })
                            .collect()
                    })
                    .collect(),
            }),
            ..TensorDetail::default()
        })
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let out = arguments.first().ok_or("usage: sample_report OUT.html [small|big|many|hostile|empty] [--serve]")?;
    let data = match arguments.get(1).map(String::as_str) {
        None | Some("small") => small(),
        Some("big") => big(),
        Some("many") => many(),
        Some("hostile") => hostile(),
        Some("empty") => ReportBuilder::new(Checkpoint { name: "empty".to_owned(), ..Checkpoint::default() }).finish(),
        Some(other) => return Err(format!("no sample is called {other}").into()),
    };
    std::fs::write(out, render(&data)?)?;
    if arguments.iter().any(|argument| argument == "--serve") {
        let server = Server::bind(&data, Arc::new(Invented), ServeOptions::default())?;
        println!("{}", server.url());
        // Stops when its input ends, so that whoever started it cannot leave it behind.
        let handle = server.stop_handle();
        std::thread::spawn(move || {
            drop(std::io::stdin().read_to_end(&mut Vec::new()));
            handle.stop();
        });
        server.run();
    }
    Ok(())
}

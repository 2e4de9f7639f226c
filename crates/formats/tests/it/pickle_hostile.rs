//! Pickles and metadata that lie: each is refused with an error that names what and where.
//!
//! `tests/pickles/make_hostile.py` makes them. None may run anything, panic, hang or take more memory than its limits.

use std::fs;

use proptest::prelude::*;
use reshard_formats::pickle::{Limits, Policy, Unknown, View, decode, decode_with_limits, read_value};
use reshard_formats::{Metadata, MetadataError};
use serde_json::Value as Json;

use crate::support::{error_text, fixture, json_fixture, read_fixture};

/// Every file of a hostile folder with the words its error must contain.
fn hostile(folder: &str) -> Vec<(String, Vec<u8>, Vec<String>)> {
    let expected = json_fixture(&format!("pickles/hostile/{folder}/expected.json"));
    let Json::Object(expected) = expected else { panic!("expected.json is not an object") };
    assert!(!expected.is_empty());
    let read = |(name, words): (String, Json)| {
        let words = words.as_array().unwrap().iter().map(|w| w.as_str().unwrap().to_owned()).collect();
        let path = format!("pickles/hostile/{folder}/{name}");
        let bytes = match fixture(&path).exists() {
            true => read_fixture(&path),
            false => expand_runs(&fs::read_to_string(fixture(&format!("{path}.runs"))).unwrap()),
        };
        (name, bytes, words)
    };
    expected.into_iter().map(read).collect()
}

fn expand_runs(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for line in text.lines() {
        let (count, hex) = line.split_once(' ').unwrap();
        let digits = hex.as_bytes().chunks(2).map(|d| std::str::from_utf8(d).unwrap());
        let part: Vec<u8> = digits.map(|d| u8::from_str_radix(d, 16).unwrap()).collect();
        bytes.extend(part.repeat(count.parse().unwrap()));
    }
    bytes
}

fn assert_words(name: &str, text: &str, words: &[String]) {
    for word in words {
        assert!(text.contains(word.as_str()), "{name}: the error does not say {word:?}: {text}");
    }
}

#[test]
fn hostile_values_are_refused_and_named() {
    for (name, bytes, words) in hostile("values") {
        let error = read_value(&bytes).expect_err(&name);
        assert_words(&name, &error_text(&error), &words);
    }
}

#[test]
fn hostile_metadata_is_refused_and_named() {
    for (name, bytes, words) in hostile("metadata") {
        let error = Metadata::decode(&bytes).expect_err(&name);
        assert_words(&name, &error_text(&error), &words);
    }
}

#[test]
fn chunks_that_do_not_tile_are_found() {
    for (name, bytes, words) in hostile("coverage") {
        let metadata = Metadata::decode(&bytes).expect(&name);
        let error = metadata.check_coverage().expect_err(&name);
        assert_words(&name, &error_text(&error), &words);
    }
}

/// Carrying unknown classes still runs nothing and still walks safely.
#[test]
fn hostile_values_are_inert_when_carried() {
    for (name, bytes, _) in hostile("values") {
        let policy = Policy::values().with_unknown(Unknown::Carry);
        let Ok(document) = decode(&bytes, policy) else { continue };
        let _ = document.to_value(document.root());
        if let Ok(carried) = document.carry(document.root()) {
            let again = decode(carried.as_pickle(), policy).expect(&name);
            assert_eq!(again.view(again.root()).kind(), document.view(document.root()).kind(), "{name}");
        }
    }
}

#[test]
fn a_carried_class_is_a_name_and_nothing_more() {
    let bytes = read_fixture("pickles/hostile/values/os_system.p4");
    let document = decode(&bytes, Policy::values().with_unknown(Unknown::Carry)).unwrap();
    let View::Object(object) = document.view(document.root()) else { panic!("not an object") };
    let class = document.global(object.class);
    assert!(class.name() == "system" && !class.is_known());
    assert_eq!(document.as_tuple(object.args).unwrap().len(), 1);
}

#[test]
fn metadata_cut_at_every_byte_is_an_error() {
    let case = "corpus/torch-2.13/fsdp2_flat_optim_w2/checkpoint/.metadata";
    let bytes = read_fixture(case);
    for end in 0..bytes.len() {
        let error = Metadata::decode(&bytes[..end]).unwrap_err();
        assert!(matches!(error, MetadataError::Pickle(_)), "{end}: {error}");
    }
    Metadata::decode(&bytes).unwrap();
}

#[test]
fn metadata_with_any_byte_changed_neither_panics_nor_hangs() {
    let bytes = read_fixture("corpus/torch-2.5/zoo/checkpoint/.metadata");
    let mut copy = bytes.clone();
    for position in 0..bytes.len() {
        for flip in [0x01, 0x80, 0xff] {
            copy[position] ^= flip;
            let _ = Metadata::decode(&copy);
            copy[position] = bytes[position];
        }
    }
}

#[test]
fn limits_are_kept() {
    let mut limits = Limits::default();
    limits.objects = 10;
    let many = [b"\x80\x04".as_slice(), &b"]".repeat(11), b"."].concat();
    let error = decode_with_limits(&many, Policy::values(), limits).unwrap_err();
    assert!(error.to_string().contains("10 objects"), "{error}");

    limits = Limits::default();
    limits.memo = 5;
    let many = [b"\x80\x04N".as_slice(), &b"\x94".repeat(6), b"."].concat();
    let error = decode_with_limits(&many, Policy::values(), limits).unwrap_err();
    assert!(error.to_string().contains("5 memo slots"), "{error}");

    limits = Limits::default();
    limits.bytes = 3;
    let error = decode_with_limits(b"\x80\x04N.", Policy::values(), limits).unwrap_err();
    assert!(error.to_string().contains("3 bytes"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Random instructions: mostly opcodes, so that runs get far.
    #[test]
    fn arbitrary_instructions_never_panic(
        instructions in prop::collection::vec(
            prop_oneof![
                prop::sample::select(b"(.012NK]})taeusblddoQRFIJLMSTUVXGgphqrj\x81\x85\x86\x87\x88\x89\x8a\x8c\x8f\x90\x91\x92\x93\x94".to_vec()),
                any::<u8>(),
            ],
            0..200,
        )
    ) {
        for unknown in [Unknown::Refuse, Unknown::Carry] {
            if let Ok(document) = decode(&instructions, Policy::torch().with_unknown(unknown)) {
                let _ = document.to_value(document.root());
                let _ = document.carry(document.root());
            }
        }
        let _ = Metadata::decode(&instructions);
    }
}

//! What must hold for every provider, whatever its form.

use super::*;

const ALL: [ProviderKind; 3] = [
    ProviderKind::OpenAi,
    ProviderKind::Anthropic,
    ProviderKind::Gemini,
];

pub fn settings_of(provider: ProviderKind, stub: &StubLlm) -> ProviderSettings {
    let (base_url, model) = match provider {
        ProviderKind::OpenAi | ProviderKind::Offline => (stub.base_url(), "stub-1"),
        ProviderKind::Anthropic => (stub.root(), "claude-sonnet-5"),
        ProviderKind::Gemini => (stub.root(), "gemini-3-flash"),
    };
    ProviderSettings {
        provider,
        base_url: Some(base_url.to_owned()),
        api_key: Some(KEY.into()),
        model: Some(model.to_owned()),
    }
}

pub async fn ask_of(provider: ProviderKind, reply: Reply) -> Result<Decision, ModelError> {
    let stub = StubLlm::start().await;
    stub.replies([reply]);
    let answer = models(settings_of(provider, &stub))
        .decide(&hello(), &|_| {})
        .await;
    assert_eq!(stub.requests().len(), 1, "one attempt is one request");
    assert_eq!(stub.refusals(), Vec::<String>::new());
    answer
}

/// As the history has a call: what a provider wants back with it is its own affair.
fn plain(calls: &[ToolCall]) -> Vec<ToolCall> {
    let without = |call: &ToolCall| ToolCall {
        provider_data: None,
        ..call.clone()
    };
    calls.iter().map(without).collect()
}

#[tokio::test]
async fn an_answer_streams_its_text_and_counts_its_tokens_alike() {
    // L-10, T-17: the input is all that the model read, the output all that it wrote.
    for provider in ALL {
        let stub = StubLlm::start().await;
        stub.replies([Reply::text("Hello wörld").usage(100, 20, 64)]);
        let pieces = Mutex::new(Vec::new());
        let on_text = |piece: &str| pieces.lock().unwrap().push(piece.to_owned());
        let models = models(settings_of(provider, &stub));
        let decision = models.decide(&hello(), &on_text).await.unwrap();
        let usage = Usage {
            input_tokens: 100,
            output_tokens: 20,
            cached_tokens: 64,
        };
        let expected = Decision {
            text: "Hello wörld".into(),
            usage,
            ..Decision::default()
        };
        assert_eq!(decision, expected, "{provider:?}");
        let pieces = pieces.into_inner().unwrap();
        assert_eq!((pieces.len(), pieces.concat()), (2, decision.text));
    }
}

#[tokio::test]
async fn calls_keep_their_bytes_streamed_in_pieces_and_whole() {
    // H-19, H-29, H-31
    let exact = r#"{"id": 9007199254740993, "u":18446744073709551615,"big":12345678901234567890123,"d":1.10, "t":"€ 😀 é"}"#;
    let said = Reply::text("grün € 😀")
        .and_call("a", "send", exact)
        .and_call("b", "send", r#"{"n": 2}"#)
        .and_call("c", "list", "");
    let expected = [
        call("a", "send", exact),
        call("b", "send", r#"{"n": 2}"#),
        call("c", "list", "{}"),
    ];
    for provider in ALL {
        for reply in [
            said.clone(),
            said.clone().byte_by_byte(),
            said.clone().plain(),
            said.clone().plain().byte_by_byte(),
        ] {
            let decision = ask_of(provider, reply).await.unwrap();
            assert_eq!(decision.text, "grün € 😀", "{provider:?}");
            assert_eq!(plain(&decision.calls), expected, "{provider:?}");
        }
    }
}

#[tokio::test]
async fn missing_and_repeated_ids_are_made_distinct_everywhere() {
    // H-24, X-9
    for provider in ALL {
        let reply = Reply::text("")
            .and_call("", "t", "{}")
            .and_call("", "t", "{}")
            .and_call("x", "t", "{}")
            .and_call("x", "t", "{}");
        let calls = ask_of(provider, reply).await.unwrap().calls;
        let ids: Vec<_> = calls.iter().map(|call| call.id.as_str()).collect();
        assert!(ids[0].starts_with("call_") && ids[1].starts_with("call_") && ids[0] != ids[1]);
        assert_eq!(ids[2..], ["x", "x_2"], "{provider:?}");
    }
}

#[tokio::test]
async fn an_answer_at_its_limit_loses_its_last_call_and_says_so() {
    // H-22, T-15
    for (provider, limit) in [
        (ProviderKind::OpenAi, "length"),
        (ProviderKind::Anthropic, "max_tokens"),
        (ProviderKind::Anthropic, "model_context_window_exceeded"),
        (ProviderKind::Gemini, "MAX_TOKENS"),
    ] {
        let two = Reply::text("")
            .and_call("a", "write", r#"{"n":25}"#)
            .and_call("b", "write", r#"{"n":2}"#);
        for reply in [two.clone().finish(limit), two.plain().finish(limit)] {
            let calls = plain(&ask_of(provider, reply).await.unwrap().calls);
            assert_eq!(calls[0], call("a", "write", r#"{"n":25}"#));
            let told = calls[1].invalid.as_deref().unwrap();
            assert!(told.contains("output limit"), "{told}");
            assert_eq!(calls[1].arguments, "{}");
        }
        let text = ask_of(provider, Reply::text("half").finish(limit)).await;
        assert!(text.unwrap().text.ends_with("reached its output limit.]"));
    }
}

#[tokio::test]
async fn an_empty_answer_is_no_failure_of_the_provider() {
    // T-15
    for provider in ALL {
        for reply in [Reply::text(""), Reply::text("").plain()] {
            let decision = ask_of(provider, reply).await.unwrap();
            assert_eq!((decision.text.as_str(), decision.calls.len()), ("", 0));
        }
    }
}

#[tokio::test]
async fn what_is_cut_garbled_or_silent_is_tried_again() {
    // H-27, T-14
    let half = [
        r#"{"choices":[{"delta":{"content":"half an answer"}}]}"#,
        r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"half an answer"}}"#,
        r#"{"candidates":[{"content":{"parts":[{"text":"half an answer"}]}}]}"#,
    ];
    for (provider, half) in ALL.into_iter().zip(half) {
        for reply in [
            Reply::hang_up(),
            Reply::events([half]),
            Reply::events([half]).then_hang_up(),
            Reply::events([&half[..20]]),
            Reply::events(["not JSON"]),
            Reply::chunks(["<html>maintenance</html>"]),
            Reply::chunks::<&str>([]),
            Reply::status(200, &half[..20]),
            Reply::status(200, r#"{"detail":"warming up"}"#),
        ] {
            let error = ask_of(provider, reply.clone()).await.unwrap_err();
            assert_eq!(
                (error.retry, error.status),
                (Retry::After(None), None),
                "{provider:?} {reply:?} {error}"
            );
        }
        let stub = StubLlm::start().await;
        stub.replies([Reply::events([half]).then_stall()]);
        let limits = Limits {
            idle_timeout: Duration::from_millis(200),
            ..LIMITS
        };
        let models = Models::new(provider, &[settings_of(provider, &stub)], limits).unwrap();
        let error = models.decide(&hello(), &|_| {}).await.unwrap_err();
        assert_eq!(error.retry, Retry::After(None));
        assert!(error.message.contains("sent nothing for 0.2 s"), "{error}");
    }
}

#[tokio::test]
async fn errors_are_read_in_the_providers_own_form_and_show_no_key() {
    // T-14, H-26
    let said = format!("No: {KEY}, sk-ant-api03-0123456789, AIzaSyA1234567890123456789012.");
    let openai = json!({"error": {"message": said, "type": "x"}}).to_string();
    let anthropic = json!({"type": "error", "error": {"type": "overloaded_error", "message": said}, "request_id": "r"})
        .to_string();
    let google = json!({"error": {
        "code": 429, "message": said, "status": "RESOURCE_EXHAUSTED",
        "details": [
            {"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": []},
            {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "7s"},
        ],
    }})
    .to_string();
    let seven = Retry::After(Some(Duration::from_secs(7)));
    for (provider, reply, status, retry) in [
        (
            ProviderKind::OpenAi,
            Reply::status(429, &openai).header("retry-after", "7"),
            429,
            seven,
        ),
        (
            ProviderKind::Anthropic,
            Reply::status(429, &anthropic).header("retry-after", "7"),
            429,
            seven,
        ),
        (
            ProviderKind::Anthropic,
            Reply::status(529, &anthropic),
            529,
            Retry::After(None),
        ),
        (
            ProviderKind::Anthropic,
            Reply::status(400, &anthropic),
            400,
            Retry::Never,
        ),
        (
            ProviderKind::Gemini,
            Reply::status(429, &google),
            429,
            seven,
        ),
        (
            ProviderKind::Gemini,
            Reply::status(503, &format!("[{google}]")),
            503,
            seven,
        ),
        (
            ProviderKind::Gemini,
            Reply::status(403, &google),
            403,
            Retry::Never,
        ),
        // The same inside a stream, or a body, that had begun with 200.
        (ProviderKind::Gemini, Reply::events([&google]), 429, seven),
        (
            ProviderKind::Gemini,
            Reply::status(200, &google),
            429,
            seven,
        ),
        (
            ProviderKind::Anthropic,
            Reply::chunks([format!("event: error\ndata: {anthropic}\n\n")]),
            529,
            Retry::After(None),
        ),
        (
            ProviderKind::Anthropic,
            Reply::events([&anthropic]),
            529,
            Retry::After(None),
        ),
        (
            ProviderKind::Anthropic,
            Reply::status(200, &anthropic),
            529,
            Retry::After(None),
        ),
    ] {
        let error = ask_of(provider, reply.clone()).await.unwrap_err();
        assert_eq!(
            (error.status, error.retry),
            (Some(status), retry),
            "{provider:?} {reply:?} {error}"
        );
        let told = "No: [redacted], [redacted], [redacted]";
        assert!(error.message.contains(told), "{provider:?} {error}");
    }
}

#[tokio::test]
async fn an_agent_names_one_of_several_providers() {
    // L-10
    let stub = StubLlm::start().await;
    let all: Vec<_> = [
        ProviderKind::Anthropic,
        ProviderKind::OpenAi,
        ProviderKind::Gemini,
    ]
    .map(|provider| settings_of(provider, &stub))
    .into();
    let models = Models::new(ProviderKind::Anthropic, &all, LIMITS).unwrap();
    let asking = |provider: Option<ProviderKind>, name: Option<&str>| Request {
        model: ModelSettings {
            provider: provider.map(|kind| kind.as_str().to_owned()),
            name: name.map(str::to_owned),
            ..ModelSettings::default()
        },
        ..hello()
    };
    for (request, uri, billed) in [
        (asking(None, None), "/v1/messages", "claude-sonnet-5"),
        (
            asking(Some(ProviderKind::OpenAi), None),
            "/v1/chat/completions",
            "stub-1",
        ),
        (
            asking(Some(ProviderKind::Gemini), None),
            "/v1beta/models/gemini-3-flash:streamGenerateContent?alt=sse",
            "gemini-3-flash",
        ),
        (
            asking(Some(ProviderKind::Gemini), Some("gemini-4")),
            "/v1beta/models/gemini-4:streamGenerateContent?alt=sse",
            "gemini-4",
        ),
    ] {
        models.decide(&request, &|_| {}).await.unwrap();
        assert_eq!(stub.requests().last().unwrap().uri, uri);
        assert_eq!(models.name_for(&request.model), billed);
    }

    // A further provider need not name a model; then the agent must.
    let nameless = ProviderSettings {
        model: None,
        ..settings_of(ProviderKind::Gemini, &stub)
    };
    let both = [settings_of(ProviderKind::OpenAi, &stub), nameless];
    let models = Models::new(ProviderKind::OpenAi, &both, LIMITS).unwrap();
    let before = stub.arrived();
    let error = models
        .decide(&asking(Some(ProviderKind::Gemini), None), &|_| {})
        .await
        .unwrap_err();
    assert_eq!(error.retry, Retry::Never);
    assert!(error.message.contains("name a model"), "{error}");
    let error = models
        .decide(&asking(Some(ProviderKind::Anthropic), None), &|_| {})
        .await
        .unwrap_err();
    assert!(
        error.message.contains("`openai`, `gemini`, `offline` only"),
        "{error}"
    );
    assert_eq!(stub.arrived(), before);
}

#[tokio::test]
async fn settings_may_come_with_the_request() {
    // L-10: as a workspace's own will.
    let stub = StubLlm::start().await;
    let demo = Models::new(ProviderKind::Offline, &[], LIMITS).unwrap();
    let own = ProviderSettings {
        api_key: Some("key-of-a-workspace".into()),
        ..settings_of(ProviderKind::Anthropic, &stub)
    };
    let decision = demo.decide_with(&own, &hello(), &|_| {}).await.unwrap();
    assert_eq!(decision.text, "ok");
    assert_eq!(
        stub.requests()[0].headers["x-api-key"],
        "key-of-a-workspace"
    );

    let wrong = ProviderSettings {
        base_url: Some("h".to_owned()),
        ..own
    };
    let error = demo
        .decide_with(&wrong, &hello(), &|_| {})
        .await
        .unwrap_err();
    assert_eq!(error.retry, Retry::Never);
    assert!(
        error.message.contains("`anthropic`") && !error.message.contains("key-of"),
        "{error}"
    );
}

#[test]
fn a_providers_own_host_needs_a_key() {
    // P-20
    for (provider, section) in [
        (ProviderKind::OpenAi, "llm.providers.openai.api_key"),
        (ProviderKind::Anthropic, "llm.providers.anthropic.api_key"),
        (ProviderKind::Gemini, "llm.providers.gemini.api_key"),
    ] {
        let settings = ProviderSettings {
            provider,
            base_url: None,
            api_key: None,
            model: Some("m".to_owned()),
        };
        let new = |default| Models::new(default, std::slice::from_ref(&settings), LIMITS);
        assert_eq!(new(provider).err().unwrap().setting, "llm.api_key");
        let other = new(ProviderKind::Offline).err().unwrap();
        assert_eq!(other.setting, section);
    }
}

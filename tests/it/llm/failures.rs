//! What comes back from a provider that refuses, breaks off or can not be reached.

use super::*;
use reconvene::domain::retry::{self, GiveUp};

#[tokio::test]
async fn the_providers_wish_for_a_delay_is_read() {
    // H-26
    let date = httpdate::fmt_http_date(std::time::SystemTime::now() + Duration::from_secs(30));
    let gemini =
        json!([{"error": {"code": 429, "message": "Quota", "details": [{"retryDelay": "7s"}]}}])
            .to_string();
    for (reply, expected) in [
        (Reply::status(429, "{}").header("retry-after", "7"), Some(7)),
        (
            Reply::status(503, "{}").header("retry-after-ms", "7000"),
            Some(7),
        ),
        (Reply::status(529, &gemini), Some(7)),
        (Reply::status(429, "{}"), None),
        (
            Reply::status(429, "{}").header("retry-after", "rubbish"),
            None,
        ),
        (
            Reply::status(429, "{}").header("retry-after", "86400"),
            Some(86_400),
        ),
    ] {
        let error = ask_once(reply).await.unwrap_err();
        assert_eq!(error.retry, Retry::After(expected.map(Duration::from_secs)));
    }
    let error = ask_once(Reply::status(429, "{}").header("retry-after", &date))
        .await
        .unwrap_err();
    let Retry::After(Some(hint)) = error.retry else {
        panic!("{error:?}")
    };
    assert!((28..=31).contains(&hint.as_secs()), "{hint:?}");

    let limits = retry::Limits {
        attempts_max: 5,
        base: Duration::from_millis(500),
        max: Duration::from_secs(60),
    };
    assert!(retry::next_delay(1, Some(hint), &limits, 0.0).unwrap() >= hint);
    let day = Some(Duration::from_secs(86_400));
    assert!(matches!(
        retry::next_delay(1, day, &limits, 0.0),
        Err(GiveUp::HintTooLong { .. })
    ));
}

#[tokio::test]
async fn statuses_decide_about_repeats_and_no_message_holds_a_key() {
    // T-14
    let body = json!({"error": {"message": format!("Bad key {KEY} or sk-proj-0123456789, Bearer abcdefghij")}}).to_string();
    for (status, again) in [
        (400, false),
        (401, false),
        (404, false),
        (302, false),
        (408, true),
        (429, true),
        (500, true),
        (503, true),
        (529, true),
    ] {
        let error = ask_once(Reply::status(status, &body)).await.unwrap_err();
        assert_eq!(
            (error.status, error.retry != Retry::Never),
            (Some(status), again),
            "{error}"
        );
        assert!(
            error
                .message
                .contains("Bad key [redacted] or [redacted], Bearer [redacted]"),
            "{error}"
        );
        assert!(error.message.contains(&status.to_string()));
    }
}

#[tokio::test]
async fn an_unreachable_provider_is_tried_again() {
    // T-14
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let base_url = format!(
        "http://{}/v1?key=in-the-url",
        listener.local_addr().unwrap()
    );
    drop(listener);
    let stub = StubLlm::start().await;
    let models = models(ProviderSettings {
        base_url: Some(base_url),
        ..settings(&stub)
    });
    let error = models.decide(&hello(), &|_| {}).await.unwrap_err();
    assert_eq!((error.retry, error.status), (Retry::After(None), None));
    assert!(
        error.message.contains("127.0.0.1 can not be reached"),
        "{error}"
    );
    assert!(!error.message.contains("in-the-url"), "{error}");
    assert!(is_retryable(&ask_once(Reply::hang_up()).await));
}

#[tokio::test]
async fn an_error_inside_a_stream_is_a_failure() {
    // H-27
    let thirty = text("thirty characters of an answer");
    let overloaded = json!({"error": {"message": "Overloaded", "type": "overloaded_error"}});
    let bad = json!({"error": {"message": "Bad request", "code": 400}});
    let done = json!("[DONE]");
    for (events, again, says) in [
        (vec![overloaded.clone(), done.clone()], true, "Overloaded"),
        (vec![thirty.clone(), overloaded.clone()], true, "Overloaded"),
        (vec![thirty.clone(), bad], false, "Bad request"),
        (vec![thirty.clone()], true, "broke off"),
        (vec![], true, "broke off"),
    ] {
        let events = events
            .into_iter()
            .map(|event| event.as_str().map_or(event.to_string(), str::to_owned));
        let error = ask_once(Reply::events(events)).await.unwrap_err();
        assert_eq!(error.retry != Retry::Never, again, "{error}");
        assert!(error.message.contains(says), "{error}");
    }
    assert!(is_retryable(
        &ask_once(Reply::events([r#"{"choices":[{"del"#])).await
    ));
    assert!(is_retryable(
        &ask_once(Reply::events([thirty.clone()]).then_hang_up()).await
    ));
    assert!(is_retryable(
        &ask_once(Reply::chunks(["<html>maintenance</html>"])).await
    ));
    assert!(is_retryable(
        &ask_once(Reply::status(200, "{\"choices\":[{\"mess")).await
    ));
    assert!(is_retryable(
        &ask_once(Reply::json(&json!({"detail": "warming up"}))).await
    ));
    let named = format!("event: error\ndata: {overloaded}\n\n");
    let error = ask_once(Reply::chunks([named])).await.unwrap_err();
    assert_eq!((error.retry, error.status), (Retry::After(None), Some(529)));
}

#[tokio::test]
async fn what_follows_the_finish_reason_can_not_take_the_answer_back() {
    // H-27
    for reply in [
        Reply::events([text("whole"), end("stop")]),
        Reply::events([text("whole"), end("stop")]).then_hang_up(),
    ] {
        assert_eq!(ask_once(reply).await.unwrap().text, "whole");
    }
    let stub = StubLlm::start().await;
    stub.replies([Reply::events([text("whole"), end("stop")]).then_stall()]);
    let idle_timeout = Duration::from_millis(200);
    let limits = Limits {
        idle_timeout,
        ..LIMITS
    };
    let models = models_within(&stub, limits);
    assert_eq!(
        models.decide(&hello(), &|_| {}).await.unwrap().text,
        "whole"
    );
}

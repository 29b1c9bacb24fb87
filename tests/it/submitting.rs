//! New tasks: keys that make a post repeatable, and messages of any length.

use crate::{
    engine::Engine,
    forced::delegate,
    messages::{other_submitter, seqs},
    stub_llm::Reply,
};
use reconvene::{
    domain::task::TaskStatus::*,
    lifecycle::{
        agents::create_workspace,
        submit::{Idempotency, Recipient, SubmitError},
    },
};

// T-2, H-45
#[tokio::test(flavor = "multi_thread")]
async fn twenty_identical_posts_over_two_processes_make_one_task() {
    let engine = Engine::scripted().await;
    let keyed = |text: &str, body: u8| {
        let mut message = engine.message(Recipient::DefaultAgent, text);
        message.idempotency = Some(Idempotency {
            key: "k".into(),
            body_hash: [body; 32],
        });
        message
    };
    let submitters = [engine.submitter.clone(), other_submitter(&engine)];
    let posts: Vec<_> = (0..20)
        .map(|n| {
            let (submitter, message) = (submitters[n % 2].clone(), keyed("hello", 1));
            tokio::spawn(async move { submitter.submit(message).await.unwrap() })
        })
        .collect();
    let mut answers = Vec::new();
    for post in posts {
        answers.push(post.await.unwrap());
    }
    assert!(answers.iter().all(|a| *a == answers[0]), "{answers:?}");
    assert!(answers[0].created);
    engine.end(answers[0].task).await;
    assert_eq!(
        engine.submit(keyed("hello", 1)).await,
        answers[0],
        "also when it is done"
    );
    assert_eq!(engine.count("select count(*) from tasks").await, 1);
    assert_eq!(seqs(&engine, answers[0].task, "user_message").await, [1]);
    assert_eq!(engine.llm().requests().len(), 1);

    let other = engine.submitter.submit(keyed("other", 2)).await;
    assert!(matches!(other, Err(SubmitError::IdempotencyKeyReused)));
    // The key is the workspace's own.
    let workspace = create_workspace(&engine.pool, "b", "B").await.unwrap();
    let mut theirs = keyed("other", 2);
    theirs.workspace = workspace;
    let theirs = engine.submit(theirs).await;
    assert!(theirs.created && theirs.task != answers[0].task);
    // Appending under a key repeats as well.
    let mut append = keyed("more", 3);
    append.to = Recipient::Task(answers[0].task);
    append.idempotency.as_mut().unwrap().key = "append".into();
    let first = engine.submit(append.clone()).await;
    assert_eq!((first.created, first.status), (false, Running));
    assert_eq!(engine.submit(append).await, first);
    assert_eq!(
        seqs(&engine, answers[0].task, "user_message").await.len(),
        2
    );
    engine.close().await;
}

// H-32, T-3: the whole text is kept; the title is cut on a character
#[tokio::test(flavor = "multi_thread")]
async fn a_long_first_message_is_kept_whole_and_its_title_cut() {
    let engine = Engine::scripted().await;
    let writer = engine.demo.writer;
    let goal = "goal ".repeat(1000);
    let prompt = goal.trim().to_owned();
    engine.llm().script(move |r| match r.turn() {
        0 if r.first_user().starts_with('🦀') => {
            Reply::call("delegate_tasks", delegate(writer, &[&prompt]))
        }
        _ => Reply::text("done"),
    });
    let text = format!("{} {}", "🦀".repeat(300), "x".repeat(99_000));
    let task = engine.post(&text).await;
    engine.end(task).await;
    let titles: Vec<String> = sqlx::query_scalar("select title from tasks order by id")
        .fetch_all(&engine.pool)
        .await
        .unwrap();
    assert_eq!(titles[0], "🦀".repeat(200));
    assert!(titles[1].starts_with("goal goal") && titles[1].chars().count() <= 200);
    let requests = engine.llm().requests();
    assert_eq!(requests[0].first_user(), text);
    assert_eq!(requests[1].first_user(), goal.trim());
    engine.close().await;
}

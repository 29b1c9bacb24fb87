//! Requests whose caller goes away, wherever they are.

use crate::support;
use reconvene::store;
use std::time::Duration;

// T-11: a write that was reported as done is committed, though a transaction was given up on its connection before.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_is_given_up_while_it_begins_is_not_left_open() {
    let observer = support::database_with(|pool| pool.max_connections(1)).await;
    let pool = sqlx::postgres::PgPoolOptions::new()
        .max_connections(1)
        .connect_with((*observer.connect_options()).clone())
        .await
        .unwrap();
    sqlx::raw_sql("create table marks ()")
        .execute(&pool)
        .await
        .unwrap();
    for polls in 0..12 {
        {
            let mut begun = Box::pin(store::begin(&pool));
            for _ in 0..polls {
                if futures::poll!(&mut begun).is_ready() {
                    break;
                }
                // Lets the answer come in.
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
        sqlx::query("insert into marks default values")
            .execute(&pool)
            .await
            .unwrap();
        let committed: i64 = sqlx::query_scalar("select count(*) from marks")
            .fetch_one(&observer)
            .await
            .unwrap();
        assert_eq!(committed, polls + 1, "given up after {polls} polls");
    }
}

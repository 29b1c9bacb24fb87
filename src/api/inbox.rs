//! What waits for a person, in the whole workspace (T-26).

use super::App;
use super::auth::Caller;
use super::error::Error;
use super::extract::{FromQuery, Json, Query, QueryReader};
use super::page::Page;
use crate::domain::ids::{AgentId, GroupId, TaskId};
use crate::store::inbox::{self, Question};
use crate::store::task_views::ParentRef;
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::Serialize;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

const LIST: &str = "inbox";
const PAGE_MAX: u32 = 200;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(get_inbox))
}

#[derive(Serialize, ToSchema)]
pub struct InboxPage {
    items: Vec<InboxItem>,
    /// `cursor` of the next page; null on the last one.
    next_cursor: Option<String>,
}

/// A question that nobody has answered.
#[derive(Serialize, ToSchema)]
pub struct InboxItem {
    /// The task that asks, and goes on when it is written to.
    task_id: TaskId,
    #[schema(example = "Offers")]
    title: String,
    agent_group_id: AgentId,
    #[schema(example = "Researcher")]
    agent_name: String,
    /// The wait, as the task and its feed show it.
    group_id: GroupId,
    #[schema(example = "Which of the three offers do you mean?")]
    question: String,
    since: DateTime<Utc>,
    /// When the task goes on without an answer; null: it waits for as long as it takes.
    deadline_at: Option<DateTime<Utc>>,
    /// The tasks above it, from the root down; empty at the top. Deleted ones are not shown.
    path: Vec<ParentRef>,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[allow(dead_code, reason = "the document's side of `InboxQuery`")]
struct InboxParams {
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// 1 to 200, default 50.
    #[param(minimum = 1, maximum = 200)]
    limit: Option<u32>,
}

struct InboxQuery(Page);

impl FromQuery for InboxQuery {
    fn from_query(query: &mut QueryReader) -> Self {
        Self(Page::up_to(PAGE_MAX, query))
    }
}

/// List what waits for a person
///
/// Every question of the workspace that is open, at any depth of any task tree, the oldest first. Answer one with
/// `POST /api/chat/message` and its `task_id`: that task goes on, and no other. The message answers all questions that this
/// task has open. Pages stay correct while questions are asked and answered: none is repeated, none skipped.
#[utoipa::path(
    get,
    path = "/api/inbox",
    tag = "tasks",
    security(("bearer" = [])),
    params(InboxParams),
    responses((status = 200, body = InboxPage))
)]
async fn get_inbox(
    State(app): State<App>,
    caller: Caller,
    Query(InboxQuery(page)): Query<InboxQuery>,
) -> Result<Json<InboxPage>, Error> {
    let after = page.after(LIST)?.map(GroupId);
    let questions = inbox::questions(&app.pool, caller.workspace, after, page.wanted()).await?;
    let (questions, next_cursor) = page.cut(LIST, questions, |question| question.group.0);
    Ok(Json(InboxPage {
        items: questions.into_iter().map(InboxItem::from).collect(),
        next_cursor,
    }))
}

impl From<Question> for InboxItem {
    fn from(question: Question) -> Self {
        Self {
            task_id: question.task,
            title: question.title,
            agent_group_id: question.agent,
            agent_name: question.agent_name,
            group_id: question.group,
            question: question.question,
            since: question.since,
            deadline_at: question.deadline_at,
            path: question.path,
        }
    }
}

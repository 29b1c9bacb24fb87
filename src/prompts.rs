//! The texts that tell models what to do: files in `prompts/`, compiled in, each replaceable by a file of the same name
//! under `prompts_dir`.
//!
//! What is put into a template is a value and never a template: instructions that hold `{{ … }}` are shown as they are.
//! The system prompt of an agent is the same, byte for byte, in every step, so that provider caches hit: nothing
//! here knows the time or the task. Everything is checked at the start, with a trial rendering, so that a mistake in an
//! operator's file is not found by a user.

use crate::domain::agent::{Phase, RosterEntry, resolve_mentions};
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, UndefinedBehavior, context};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

const SYSTEM: &str = "agent/system.md.tmpl";
const PROFILE_SYSTEM: &str = "agent/agent_delegation_profile_system.txt";
const PROFILE_USER: &str = "agent/agent_delegation_profile_user.tmpl";

/// Every prompt file by its path under `prompts/`.
const FILES: [(&str, &str); 10] = [
    (
        PROFILE_SYSTEM,
        include_str!("../prompts/agent/agent_delegation_profile_system.txt"),
    ),
    (
        PROFILE_USER,
        include_str!("../prompts/agent/agent_delegation_profile_user.tmpl"),
    ),
    (SYSTEM, include_str!("../prompts/agent/system.md.tmpl")),
    (
        "tools/ask_user.md",
        include_str!("../prompts/tools/ask_user.md"),
    ),
    (
        "tools/delegate_tasks.md",
        include_str!("../prompts/tools/delegate_tasks.md"),
    ),
    (
        "tools/get_subtask_result.md",
        include_str!("../prompts/tools/get_subtask_result.md"),
    ),
    (
        "tools/http_request.md",
        include_str!("../prompts/tools/http_request.md"),
    ),
    (
        "tools/run_code.md",
        include_str!("../prompts/tools/run_code.md"),
    ),
    (
        "tools/wait_for_signal.md",
        include_str!("../prompts/tools/wait_for_signal.md"),
    ),
    (
        "tools/wait_until.md",
        include_str!("../prompts/tools/wait_until.md"),
    ),
];

#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    #[error("{} can not be read", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error(
        "{} is not a prompt of this version; the files are {}",
        path.display(),
        FILES.map(|(name, _)| name).join(", ")
    )]
    Unknown { path: PathBuf },
    #[error("{file} is empty")]
    Empty { file: String },
    #[error("{file}, line {line}: {reason}")]
    Template {
        file: String,
        line: usize,
        reason: String,
    },
}

/// What an agent's system prompt is made from.
#[derive(Clone, Copy, Debug)]
pub struct SystemPrompt<'a> {
    pub agent_name: &'a str,
    pub instructions: &'a str,
    pub phases: &'a [Phase],
    /// `None` without a delegate tool; an empty roster says so in the prompt.
    pub roster: Option<&'a [RosterEntry]>,
    /// Of the final answer (T-16).
    pub output_schema: Option<&'a serde_json::Value>,
}

/// What asks for an agent's delegation profile. All texts are harmless already.
#[derive(Clone, Copy, Debug)]
pub struct ProfilePrompt<'a> {
    pub name: &'a str,
    /// With their descriptions.
    pub tools: &'a [(String, String)],
    pub instructions: &'a str,
    /// What was wrong with the answer before, if there was one.
    pub problem: &'a str,
}

/// A prompt in its named parts, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sections(pub Vec<Section>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    pub name: String,
    pub text: String,
}

impl Sections {
    /// The prompt as the model gets it.
    pub fn joined(&self) -> String {
        let texts: Vec<_> = self.0.iter().map(|section| section.text.as_str()).collect();
        texts.join("\n\n")
    }
}

pub struct Prompts {
    templates: Environment<'static>,
    /// The files that are no templates, by path.
    texts: BTreeMap<&'static str, String>,
    /// Where each template comes from, for messages.
    origins: BTreeMap<&'static str, String>,
    /// Stands where a section begins. Made at start and unknown outside, so that no value can forge a section.
    mark: String,
}

impl Prompts {
    /// The compiled-in texts, with those under `dir` in their place. Any mistake in any file is an error.
    pub fn load(dir: Option<&Path>) -> Result<Self, PromptError> {
        let mut files: BTreeMap<&'static str, (String, String)> = FILES
            .iter()
            .map(|&(name, text)| (name, (format!("prompts/{name}"), text.to_owned())))
            .collect();
        if let Some(dir) = dir {
            read_overrides(dir, dir, &mut files)?;
        }

        let mark = format!("\u{1}{}\u{1}", uuid::Uuid::new_v4());
        let mut templates = Environment::new();
        templates.set_undefined_behavior(UndefinedBehavior::Strict);
        templates.set_auto_escape_callback(|_| AutoEscape::None);
        let begin = mark.clone();
        templates.add_function("section", move |name: &str| format!("{begin}{name}{begin}"));

        let mut texts = BTreeMap::new();
        let mut origins = BTreeMap::new();
        for (name, (file, text)) in files {
            if text.trim().is_empty() {
                return Err(PromptError::Empty { file });
            }
            if !name.ends_with(".tmpl") {
                texts.insert(name, text.trim().to_owned());
                continue;
            }
            templates
                .add_template_owned(name, text)
                .map_err(|error| template_error(&file, &error))?;
            origins.insert(name, file);
        }
        let prompts = Self {
            templates,
            texts,
            origins,
            mark,
        };
        prompts.try_out()?;
        Ok(prompts)
    }

    /// The system prompt of an agent. Fails only where an overriding file fails on these very values.
    pub fn system(&self, prompt: &SystemPrompt<'_>) -> Result<Sections, PromptError> {
        let entries = prompt.roster.unwrap_or_default().iter().map(|entry| {
            context! {
                name => entry.name.as_str(),
                id => entry.id.to_string(),
                description => entry.description.as_str(),
                example => entry.example.as_str(),
                public => entry.public,
                bullet => entry.to_string(),
            }
        });
        self.render_system(prompt, entries.collect())
    }

    /// What the model is told about a built-in tool.
    pub fn tool(&self, name: &str) -> Option<&str> {
        let path = format!("tools/{name}.md");
        self.texts.get(path.as_str()).map(String::as_str)
    }

    /// The system prompt of whoever writes a delegation profile.
    pub fn profile_system(&self) -> &str {
        self.texts.get(PROFILE_SYSTEM).map_or("", String::as_str)
    }

    /// What asks for one agent's profile. Fails only where an overriding file fails on these very values.
    pub fn profile(&self, prompt: &ProfilePrompt<'_>) -> Result<String, PromptError> {
        let tools = prompt.tools.iter();
        let tools: Vec<Value> = tools
            .map(|(name, description)| context! { name, description })
            .collect();
        let values = context! {
            name => prompt.name.trim_end(),
            tools => tools,
            instructions => prompt.instructions.trim_end(),
            problem => prompt.problem,
        };
        Ok(self.render(PROFILE_USER, values)?.trim().to_owned())
    }

    fn render(&self, name: &str, values: Value) -> Result<String, PromptError> {
        self.templates
            .get_template(name)
            .and_then(|template| template.render(values))
            .map_err(|error| {
                let file = self.origins.get(name);
                template_error(file.map_or(name, String::as_str), &error)
            })
    }

    fn render_system(
        &self,
        prompt: &SystemPrompt<'_>,
        roster: Vec<Value>,
    ) -> Result<Sections, PromptError> {
        let resolved = |text| resolve_mentions(text, prompt.roster.unwrap_or_default());
        let phases: Vec<Value> = prompt
            .phases
            .iter()
            .map(|phase| {
                let instructions = resolved(&phase.instructions);
                context! { name => &phase.name, instructions => instructions, tools => &phase.tools }
            })
            .collect();
        let values = context! {
            agent_name => prompt.agent_name,
            instructions => resolved(prompt.instructions),
            phases => phases,
            can_delegate => prompt.roster.is_some(),
            roster => roster,
            output_schema => prompt.output_schema.map(ToString::to_string),
        };
        let rendered = self.render(SYSTEM, values)?;
        Ok(self.cut(&rendered))
    }

    /// Text before the first section has the name `preamble`; a section without text is left out.
    fn cut(&self, rendered: &str) -> Sections {
        let mut pieces = rendered.split(&self.mark);
        let mut sections = vec![("preamble", pieces.next().unwrap_or_default())];
        while let (Some(name), Some(text)) = (pieces.next(), pieces.next()) {
            sections.push((name, text));
        }
        Sections(
            sections
                .into_iter()
                .map(|(name, text)| Section {
                    name: name.to_owned(),
                    text: text.trim().to_owned(),
                })
                .filter(|section| !section.text.is_empty())
                .collect(),
        )
    }

    /// Renders each shape once, so that an unknown variable is found at the start.
    fn try_out(&self) -> Result<(), PromptError> {
        let agent = context! {
            name => "Name", id => "id", description => "Description", example => "Example",
            public => true, bullet => "- Name",
        };
        let schema = serde_json::json!({"type": "object"});
        let phase = Phase {
            name: "Name".into(),
            tools: vec!["tool".into()],
            ..Phase::default()
        };
        for roster in [None, Some(vec![]), Some(vec![agent.clone(), agent])] {
            let prompt = SystemPrompt {
                agent_name: "Name",
                instructions: "Instructions",
                phases: if roster.is_some() {
                    std::slice::from_ref(&phase)
                } else {
                    &[]
                },
                roster: roster.is_some().then_some(&[]),
                output_schema: roster.is_some().then_some(&schema),
            };
            self.render_system(&prompt, roster.unwrap_or_default())?;
        }
        let tools = [("tool".to_owned(), "Description".to_owned())];
        for (tools, problem) in [(&tools[..], ""), (&[], "Problem")] {
            self.profile(&ProfilePrompt {
                name: "> Name",
                tools,
                instructions: "> Instructions",
                problem,
            })?;
        }
        Ok(())
    }
}

/// Takes the files under `dir` (hidden ones apart: volumes and editors keep their own there).
fn read_overrides(
    root: &Path,
    dir: &Path,
    files: &mut BTreeMap<&'static str, (String, String)>,
) -> Result<(), PromptError> {
    let unreadable = |path: &Path| {
        let path = path.to_owned();
        move |source| PromptError::Unreadable { path, source }
    };
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir).map_err(unreadable(dir))? {
        let entry = entry.map_err(unreadable(dir))?;
        if !entry.file_name().to_string_lossy().starts_with('.') {
            paths.push(entry.path());
        }
    }
    paths.sort();
    for path in paths {
        if fs::metadata(&path).map_err(unreadable(&path))?.is_dir() {
            read_overrides(root, &path, files)?;
            continue;
        }
        let name = path
            .strip_prefix(root)
            .ok()
            .and_then(Path::to_str)
            .unwrap_or_default();
        let Some(known) = files.get_mut(name) else {
            return Err(PromptError::Unknown { path });
        };
        let text = fs::read_to_string(&path).map_err(unreadable(&path))?;
        *known = (path.display().to_string(), text);
    }
    Ok(())
}

fn template_error(file: &str, error: &minijinja::Error) -> PromptError {
    let reason = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    PromptError::Template {
        file: file.to_owned(),
        line: error.line().unwrap_or(1),
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::agent::AgentDefinition;
    use crate::domain::ids::AgentId;
    use serde_json::json;

    struct Dir(PathBuf);

    impl Dir {
        fn with(files: &[(&str, &str)]) -> Self {
            let dir = std::env::temp_dir().join(format!("reconvene-{}", uuid::Uuid::new_v4()));
            for (name, text) in files {
                let path = dir.join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Self(dir)
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn entry(name: &str, public: bool) -> RosterEntry {
        let config = json!({"delegation_profile": {"description": "Finds {{ facts }}", "example_input": "Find"}});
        let definition = AgentDefinition {
            name: name.to_owned(),
            config: config.as_object().unwrap().clone(),
            ..AgentDefinition::default()
        };
        let entry = RosterEntry::new(AgentId(uuid::Uuid::nil()), &definition).unwrap();
        if public { entry.lent() } else { entry }
    }

    fn prompt<'a>(instructions: &'a str, roster: Option<&'a [RosterEntry]>) -> SystemPrompt<'a> {
        SystemPrompt {
            agent_name: "Lead",
            instructions,
            phases: &[],
            roster,
            output_schema: None,
        }
    }

    fn names(sections: &Sections) -> Vec<&str> {
        sections
            .0
            .iter()
            .map(|section| section.name.as_str())
            .collect()
    }

    //
    #[test]
    fn phases_are_a_section_of_their_own_in_their_order() {
        let phase = |name: &str, tools: &[&str]| Phase {
            name: name.into(),
            instructions: format!("Do {name}."),
            tools: tools.iter().map(|t| t.to_string()).collect(),
        };
        let phases = [
            phase("plan", &["ask_user", "delegate_tasks"]),
            phase("{{ act }}", &[]),
        ];
        let with = SystemPrompt {
            phases: &phases,
            ..prompt("Work.", None)
        };
        let sections = Prompts::load(None).unwrap().system(&with).unwrap();
        assert_eq!(names(&sections), ["instructions", "phases", "rules"]);
        let (_, text) = sections.0[1].text.split_once("## ").unwrap();
        assert_eq!(
            text,
            "1. plan\n\nDo plan.\nTools of this phase: ask_user, delegate_tasks\n\n## 2. {{ act }}\n\nDo {{ act }}."
        );
    }

    // T-16, A-31: asked for in words, whatever the provider is told beside them.
    #[test]
    fn the_schema_of_the_answer_is_a_section_of_its_own() {
        let schema = json!({"type": "object", "title": "{{ agent_name }}"});
        let with = SystemPrompt {
            output_schema: Some(&schema),
            ..prompt("Work.", None)
        };
        let sections = Prompts::load(None).unwrap().system(&with).unwrap();
        assert_eq!(names(&sections), ["instructions", "rules", "output"]);
        assert!(
            sections.0[2]
                .text
                .ends_with("\n\n{\"type\":\"object\",\"title\":\"{{ agent_name }}\"}")
        );
    }

    #[test]
    fn the_roster_is_shown_when_the_agent_may_delegate() {
        //
        let prompts = Prompts::load(None).unwrap();
        let roster = [entry("Researcher", false), entry("Writer", true)];
        let sections = prompts.system(&prompt("Plan.", Some(&roster))).unwrap();
        assert_eq!(
            names(&sections),
            ["instructions", "rules", "delegation", "roster"]
        );
        assert_eq!(sections.0[0].text, "You are Lead.\n\nPlan.");
        let bullets: Vec<_> = roster.iter().map(RosterEntry::to_string).collect();
        assert_eq!(
            sections.0[3].text,
            format!("# Agents you can delegate to\n\n{}", bullets.join("\n"))
        );
        assert!(sections.joined().contains("the place of `{{item}}`"));

        let alone = prompts.system(&prompt("Plan.", None)).unwrap();
        assert_eq!(names(&alone), ["instructions", "rules"]);
        assert!(!alone.joined().contains("delegate"));
        let nobody = prompts.system(&prompt("Plan.", Some(&[]))).unwrap();
        assert!(nobody.0[3].text.ends_with("do not call `delegate_tasks`."));
    }

    #[test]
    fn names_in_instructions_are_resolved_where_there_is_a_roster() {
        //
        let prompts = Prompts::load(None).unwrap();
        let phases = [Phase {
            name: "@Writer".into(),
            instructions: "Then @Writer.".into(),
            tools: vec![],
        }];
        let roster = [entry("Writer", false)];
        let texts = |roster| {
            let with = SystemPrompt {
                phases: &phases,
                ..prompt("Ask @Writer or @Nobody.", roster)
            };
            let sections = prompts.system(&with).unwrap();
            [sections.0[0].text.clone(), sections.0[1].text.clone()]
        };
        let id = uuid::Uuid::nil();
        let [own, phase] = texts(Some(&roster));
        assert!(own.ends_with(&format!("Ask @Writer (agent_group_id: {id}) or @Nobody.")));
        assert!(phase.ends_with(&format!(
            "## 1. @Writer\n\nThen @Writer (agent_group_id: {id})."
        )));
        for nobody in [None, Some(&[][..])] {
            let [own, phase] = texts(nobody);
            assert!(own.ends_with("Ask @Writer or @Nobody.") && phase.ends_with("Then @Writer."));
        }
    }

    #[test]
    fn values_are_never_templates_and_the_prompt_is_stable() {
        //
        let prompts = Prompts::load(None).unwrap();
        let text = "{{ agent_name }} {% for x in y %} {{ section(\"rules\") }} <b> & \u{1}x\u{1}";
        let roster = [entry("A", false)];
        let first = prompts.system(&prompt(text, Some(&roster))).unwrap();
        assert!(first.0[0].text.ends_with(text));
        assert_eq!(first.0.len(), 4);
        assert!(!first.joined().contains(&prompts.mark));
        let second = Prompts::load(None)
            .unwrap()
            .system(&prompt(text, Some(&roster)))
            .unwrap();
        assert_eq!(first.joined(), second.joined());
    }

    #[test]
    fn every_tool_has_its_text() {
        let prompts = Prompts::load(None).unwrap();
        for tool in [
            "delegate_tasks",
            "ask_user",
            "get_subtask_result",
            "wait_until",
            "wait_for_signal",
        ] {
            assert!(
                prompts.tool(tool).is_some_and(|text| text.ends_with('.')),
                "{tool}"
            );
        }
        assert_eq!(prompts.tool("unknown"), None);
    }

    #[test]
    fn a_directory_overrides_single_files() {
        //
        let dir = Dir::with(&[
            (
                SYSTEM,
                "Hello {{ agent_name }}.\n{{ section(\"own\") }}{{ instructions }}",
            ),
            ("tools/ask_user.md", "\nAsk.\n"),
            (".git/config", "ignored"),
        ]);
        let prompts = Prompts::load(Some(&dir.0)).unwrap();
        let sections = prompts.system(&prompt("Do.", None)).unwrap();
        assert_eq!(names(&sections), ["preamble", "own"]);
        assert_eq!(sections.joined(), "Hello Lead.\n\nDo.");
        assert_eq!(prompts.tool("ask_user"), Some("Ask."));
        assert!(prompts.tool("delegate_tasks").is_some());
    }

    #[test]
    fn a_mistake_stops_the_start_with_file_and_line() {
        //
        for (file, text, says) in [
            (SYSTEM, "a\n{% if x %}\nb", "agent/system.md.tmpl, line 2: "),
            (SYSTEM, "a\n{{ 1 + }}", "agent/system.md.tmpl, line 2: "),
            (
                SYSTEM,
                "a\n\n{{ agent_nmae }}",
                "agent/system.md.tmpl, line 3: ",
            ),
            (
                SYSTEM,
                "{% for a in roster %}\n{{ a.nmae }}{% endfor %}",
                "agent/system.md.tmpl, line 2: ",
            ),
            (SYSTEM, "{{ now() }}", "agent/system.md.tmpl, line 1: "),
            (
                PROFILE_USER,
                "\n{% if problem %}{{ problm }}{% endif %}",
                "profile_user.tmpl, line 2: ",
            ),
            (PROFILE_SYSTEM, "", "profile_system.txt is empty"),
            ("tools/ask_user.md", " \n", "ask_user.md is empty"),
            (
                "tools/other.md",
                "x",
                "the files are agent/agent_delegation_profile_system.txt, agent/agent_delegation_profile_user.tmpl, agent/system.md.tmpl, tools/ask_user.md",
            ),
            ("agent/system.md", "x", "is not a prompt of this version"),
        ] {
            let dir = Dir::with(&[(file, text)]);
            let error = Prompts::load(Some(&dir.0)).err().unwrap().to_string();
            assert!(error.contains(says), "{text:?}: {error}");
            assert!(error.contains(dir.0.to_str().unwrap()), "{error}");
        }
        assert!(matches!(
            Prompts::load(Some(Path::new("/nowhere/prompts"))),
            Err(PromptError::Unreadable { .. })
        ));
    }
}

set local lock_timeout = '500ms';

drop table decision_logs;
drop table prompt_texts;

set local lock_timeout = '5s';

drop table decision_logs;
drop table prompt_texts;
